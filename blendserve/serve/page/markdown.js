// The Markdown that models write, as elements: paragraphs, headings, lists, code, bold and italic. No HTML, no links.

import { el } from "./dom.js";

const FENCE = /^\s*(`{3,}|~{3,})/;
const HEADING = /^#{1,6}\s+(.+?)\s*#*$/;
const ITEM = /^(\s*)(?:[-*+]|(\d+)[.)])\s+(.*)$/;
const INLINE = /(`+)(.+?)\1|\*\*(?=\S)(.+?)\*\*|\*(?=[^\s*])(.+?)\*|\uE000(\d+)\uE001/g; // the last: see mark

/** What stands for a link to a passage, by its number from 1. */
export function mark(passage) {
  return `\uE000${passage}\uE001`;
}

/** The elements of a text; an open code block ends with the text. */
export function markdown(text) {
  const lines = text.split("\n");
  const blocks = [];
  for (let i = 0; i < lines.length; ) {
    const take = (isMore) => {
      const start = i;
      do i += 1;
      while (i < lines.length && isMore(lines[i]));
      return lines.slice(start, i);
    };
    const fence = lines[i].match(FENCE)?.[1];
    if (fence) {
      const [, ...code] = take((line) => !line.trim().startsWith(fence));
      i += 1; // the closing fence
      blocks.push(el("pre", { tabindex: "0" }, el("code", {}, code.join("\n"))));
    } else if (HEADING.test(lines[i])) blocks.push(el("p", { class: "heading" }, ...inline(lines[i++].match(HEADING)[1])));
    else if (ITEM.test(lines[i])) blocks.push(list(take((line) => ITEM.test(line) || /^\s+\S/.test(line))));
    else if (!lines[i].trim()) i += 1;
    else blocks.push(el("p", {}, ...inline(take((line) => line.trim() && !isBlock(line)).join("\n"))));
  }
  return blocks;
}

function show(passage) {
  document.getElementById(`passage-${passage}`)?.scrollIntoView({ block: "center" });
}

function isBlock(line) {
  return [FENCE, HEADING, ITEM].some((form) => form.test(line));
}

/** A list of the lines of its items; deeper items are a list of the item before them. */
function list(lines) {
  const [, indent, first] = lines[0].match(ITEM);
  const items = []; // [text, deeper lines]
  for (const line of lines) {
    const item = line.match(ITEM);
    const isDeeper = items.length > 0 && (item ? item[1].length > indent.length : items.at(-1)[1].length > 0);
    if (isDeeper) items.at(-1)[1].push(line);
    else if (item) items.push([item[3], []]);
    else items.at(-1)[0] += `\n${line.trim()}`;
  }
  const made = items.map(([text, deeper]) => el("li", {}, ...inline(text), deeper.length > 0 && list(deeper)));
  return first === undefined ? el("ul", {}, ...made) : el("ol", { start: first }, ...made);
}

/** Text with code, bold and italic words. */
function inline(text) {
  const nodes = [];
  let end = 0;
  for (const { 0: whole, 2: code, 3: bold, 4: italic, 5: passage, index } of text.matchAll(INLINE)) {
    nodes.push(text.slice(end, index));
    if (code !== undefined) nodes.push(el("code", {}, code.trim()));
    else if (bold !== undefined) nodes.push(el("strong", {}, ...inline(bold)));
    else if (italic !== undefined) nodes.push(el("em", {}, ...inline(italic)));
    else nodes.push(el("sup", {}, el("button", { type: "button", class: "cite", "aria-label": `Passage ${passage}`, onclick: () => show(passage) }, passage)));
    end = index + whole.length;
  }
  return [...nodes, text.slice(end)];
}
