// The time to the first token, by stage: a bar, and the same in words.

import { el } from "./dom.js";
import { ms } from "./format.js";

const STAGES = [
  ["retrieve", "search", "finding the passages"],
  ["queue", "wait", "behind other requests"],
  ["load", "load KV", "reading, checking, rotating and placing stored KV"],
  ["select", "select", "choosing the tokens to recompute"],
  ["correct", "correct", "correcting what is reused"],
  ["compute", "compute", "running rows through the model"],
  ["rest", "rest", "tokenising, laying out, handing over"],
];

const LEAST = 0.002; // of the bar: what is shorter would be all edge

/** Seconds by stage; they add up to the time to the first token. */
export function stagesOf(timings) {
  const compute = timings.prefill - timings.load - timings.select - timings.correct;
  const rest = timings.ttft - timings.retrieve - timings.queue - timings.prefill;
  return { ...timings, compute: Math.max(0, compute), rest: Math.max(0, rest) };
}

/** The bar alone. `scale`: seconds of its full width. */
export function stageBar(timings, scale = timings.ttft) {
  const seconds = stagesOf(timings);
  const shown = STAGES.filter(([name]) => seconds[name] > scale * LEAST);
  return el(
    "div",
    { class: "bar", "aria-hidden": "true" },
    ...shown.map(([name]) =>
      el("span", { class: `stage-${name}`, style: { width: `${(100 * seconds[name]) / scale}%` } }),
    ),
  );
}

/** The bar with its legend. */
export function stageView(timings) {
  const seconds = stagesOf(timings);
  return el(
    "div",
    {},
    stageBar(timings),
    el(
      "ul",
      { class: "stages" },
      ...STAGES.filter(([name]) => seconds[name] >= 5e-5).map(([name, label, about]) =>
        el(
          "li",
          { title: about },
          el("i", { class: `swatch stage-${name}` }),
          el("span", {}, label),
          el("b", {}, ms(seconds[name])),
        ),
      ),
    ),
  );
}
