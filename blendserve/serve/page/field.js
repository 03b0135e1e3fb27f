// A prompt as a field of cells, one for each token, which fills as its prefill goes on.

import { svg } from "./dom.js";
import { STATES } from "./states.js";

const MOST_CELLS = 4000; // of a field; a cell of a longer prompt has several tokens
const COLUMNS = 90; // about so many, if cells are of MIN to MAX pixels
const [MIN, MAX] = [4, 6];
const GAP = 1; // pixels
const ORDER = Object.keys(STATES); // a cell of several tokens shows the last of their states
let number = 0;

/** A field of `width` pixels -> its element; `set(states)`, and `fill(share)` of the cells, in reading order. */
export function makeField(width) {
  const pitch = Math.max(MIN, Math.min(MAX, Math.round(width / COLUMNS)));
  const columns = Math.max(1, Math.floor((width + GAP) / pitch));
  const id = `field-${(number += 1)}`;
  const [rows, row] = [svg("rect"), svg("rect")]; // what is filled: whole rows, and a part of one
  const empty = svg("path", { class: "empty" });
  const filled = svg("g", { "clip-path": `url(#${id})` });
  const element = svg(
    "svg",
    { class: "field", "aria-hidden": "true", width: columns * pitch - GAP },
    svg("clipPath", { id }, rows, row),
    empty,
    filled,
  );
  let cells = [];

  function set(states) {
    const each = Math.ceil(states.length / MOST_CELLS);
    cells = [];
    for (let i = 0; i < states.length; i += each) {
      const ranks = states.slice(i, i + each).map((state) => ORDER.indexOf(state));
      cells.push(ORDER[Math.max(...ranks)]);
    }
    const side = pitch - GAP;
    const square = (n) => `M${(n % columns) * pitch} ${Math.floor(n / columns) * pitch}h${side}v${side}h-${side}z`;
    const paths = new Map();
    cells.forEach((state, n) => paths.set(state, (paths.get(state) ?? "") + square(n)));
    empty.setAttribute("d", cells.map((_, n) => square(n)).join(""));
    filled.replaceChildren(...[...paths].map(([state, d]) => svg("path", { class: `cells-${state}`, d })));
    element.setAttribute("height", Math.max(1, Math.ceil(cells.length / columns) * pitch - GAP));
    fill(0);
  }

  function fill(share) {
    const n = Math.floor(share * cells.length);
    const whole = Math.floor(n / columns);
    sized(rows, 0, 0, columns * pitch, whole * pitch);
    sized(row, 0, whole * pitch, (n % columns) * pitch, pitch);
  }

  return { element, set, fill };
}

function sized(rect, x, y, width, height) {
  for (const [name, value] of Object.entries({ x, y, width, height })) rect.setAttribute(name, value);
}
