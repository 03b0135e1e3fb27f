// Parts that several views use.

import { el } from "./dom.js";
import { count } from "./format.js";

/** A figure with its name, a note and, for a share from 0 to 1, a meter. */
export function tile(name, value, about, share = null) {
  return el(
    "div",
    { class: "tile" },
    el("p", { class: "name" }, name),
    el("p", { class: "value" }, value),
    share !== null && el("div", { class: "bar", "aria-hidden": "true" }, el("span", { class: "fill", style: { width: `${100 * Math.min(1, share)}%` } })),
    el("p", { class: "muted" }, about),
  );
}

/** A choice of collection, hidden if there is only one. */
export function collectionField(id, changed) {
  const select = el("select", { id, onchange: changed });
  const element = el("div", { class: "field", hidden: true }, el("label", { for: id }, "Collection"), select);
  return {
    element,
    get value() {
      return select.value;
    },
    fill(collections) {
      const before = select.value;
      select.replaceChildren(...collections.map(({ name }) => el("option", { value: name }, name)));
      if (collections.some(({ name }) => name === before)) select.value = before;
      element.hidden = collections.length < 2;
    },
  };
}

/** Buttons for pages of `size` entries. */
export function pager(size, go) {
  let at = 0;
  const said = el("span", { class: "muted" });
  const back = el("button", { type: "button", onclick: () => go(Math.max(0, at - size)) }, "Previous");
  const on = el("button", { type: "button", onclick: () => go(at + size) }, "Next");
  return {
    element: el("div", { class: "pager" }, back, said, on),
    show(total, offset) {
      at = offset;
      said.textContent = total ? `${count(offset + 1)}–${count(Math.min(total, offset + size))} of ${count(total)}` : "";
      back.disabled = offset === 0;
      on.disabled = offset + size >= total;
    },
  };
}
