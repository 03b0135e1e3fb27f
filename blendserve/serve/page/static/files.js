// Files into documents, in groups that fit into a request each.

const LINES = /\.(jsonl|ndjson)$/i;
const TEXTS = /\.(txt|md|markdown)$/i;
const HEADING = /^#{1,6}\s+(.+?)\s*#*\s*$/m;
const FRAME = 1000; // bytes of a request beside its documents
const MOST = 500; // documents of a request
const encoder = new TextEncoder();

/** Groups of documents, no group of more than `most` bytes. Throws Error, naming the file. */
export async function readFiles(files, most) {
  const groups = [];
  let size = Infinity;
  for (const file of files) {
    for (const document of await documentsOf(file)) {
      const bytes = encoder.encode(JSON.stringify(document)).length + 1;
      if (bytes + FRAME > most) throw new Error(`${file.name}: a document is larger than the server takes in one request. Split it.`);
      if (size + bytes + FRAME > most || groups.at(-1).length >= MOST) {
        groups.push([]);
        size = 0;
      }
      groups.at(-1).push(document);
      size += bytes;
    }
  }
  return groups;
}

async function documentsOf(file) {
  if (!LINES.test(file.name) && !TEXTS.test(file.name)) {
    throw new Error(`${file.name}: this kind is not read. Bring .txt, .md or .jsonl files.`);
  }
  const text = await file.text();
  if (LINES.test(file.name)) {
    return text
      .split("\n")
      .map((line, n) => [line, n + 1])
      .filter(([line]) => line.trim())
      .map(([line, n]) => parsed(line, `${file.name}, line ${n}`));
  }
  if (!text.trim()) throw new Error(`${file.name}: it has no text.`);
  const title = /\.txt$/i.test(file.name) ? null : text.match(HEADING)?.[1];
  return [{ text, title: (title ?? file.name.replace(/\.\w+$/, "")).slice(0, 512), id: file.name.slice(0, 512) }];
}

function parsed(line, where) {
  let values;
  try {
    values = JSON.parse(line);
  } catch {
    throw new Error(`${where}: this is no JSON object.`);
  }
  if (typeof values?.text !== "string" || !values.text) throw new Error(`${where}: "text" is missing.`);
  return { text: values.text, title: String(values.title ?? ""), id: String(values.id ?? "") };
}
