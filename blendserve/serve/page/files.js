// Files in groups of one request each. The server reads them.

const MAX_FILES = 100; // of a request
const OVERHEAD = 1000; // bytes of a file's part of a form, without its content

/** Forms of these files, each of at most `maxBytes`. Throws an Error that names a file that is larger. */
export function formsOf(files, collection, maxBytes) {
  const groups = [];
  let size = Infinity;
  for (const file of files) {
    const bytes = file.size + OVERHEAD;
    if (bytes > maxBytes) throw new Error(`${file.name}: the file is larger than the server's limit (serve.max_upload_mb).`);
    if (size + bytes > maxBytes || groups.at(-1).length >= MAX_FILES) {
      groups.push([]);
      size = 0;
    }
    groups.at(-1).push(file);
    size += bytes;
  }
  return groups.map((group) => formOf(group, collection));
}

function formOf(files, collection) {
  const form = new FormData();
  for (const file of files) form.append("files", file, file.name);
  if (collection) form.append("collection", collection);
  return form;
}
