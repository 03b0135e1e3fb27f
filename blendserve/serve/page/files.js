// Files as documents, as `blendserve index build` reads them, in groups of one request each.

const LINES = /\.(jsonl|ndjson|json)$/i;
const TEXTS = /\.(txt|md|markdown)$/i;
const HEADING = /^#{1,6}\s+(.+?)\s*#*\s*$/m;
const FENCED = /^(```|~~~)[^]*?^\1/gm;
const OVERHEAD = 1000; // bytes of a request without its documents
const MAX_DOCUMENTS = 500; // of a request
const MAX_LABEL = 512; // characters of a title or an id
const encoder = new TextEncoder();
const decoder = new TextDecoder("utf-8", { fatal: true });

/** Groups of documents, each of at most `maxBytes`. Throws an Error that names the file. */
export async function readFiles(files, maxBytes) {
  const groups = [];
  let size = Infinity;
  for (const file of files) {
    for (const document of await documentsOf(file)) {
      const bytes = encoder.encode(JSON.stringify(document)).length + 1;
      if (bytes + OVERHEAD > maxBytes) throw new Error(`${file.name}: a document is larger than the server's request limit. Split it.`);
      if (size + bytes + OVERHEAD > maxBytes || groups.at(-1).length >= MAX_DOCUMENTS) {
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
    throw new Error(`${file.name}: this file type is not supported. Use .txt, .md or .jsonl files.`);
  }
  const text = decoded(await file.arrayBuffer(), file.name);
  if (LINES.test(file.name)) {
    return text
      .split("\n")
      .map((line, n) => [line, n + 1])
      .filter(([line]) => line.trim())
      .map(([line, n]) => parsed(line, `${file.name}, line ${n}`));
  }
  if (!text.trim()) throw new Error(`${file.name}: the file has no text.`);
  const heading = /\.txt$/i.test(file.name) ? null : text.replace(FENCED, "").match(HEADING);
  const title = heading?.[1] ?? file.name.replace(/\.\w+$/, "");
  return [{ text, title: title.slice(0, MAX_LABEL), id: file.name.slice(0, MAX_LABEL) }];
}

function decoded(bytes, name) {
  try {
    return decoder.decode(bytes);
  } catch {
    throw new Error(`${name}: not UTF-8. Save the file as UTF-8 text.`);
  }
}

function parsed(line, where) {
  let values;
  try {
    values = JSON.parse(line);
  } catch {
    throw new Error(`${where}: not a JSON object.`);
  }
  if (typeof values?.text !== "string" || !values.text.trim()) throw new Error(`${where}: "text" is missing.`);
  return { text: values.text, title: String(values.title ?? "").trim(), id: String(values.id ?? "") };
}
