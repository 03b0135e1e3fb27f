// The time to first token by stage: a bar and a legend.

import { el } from "./dom.js";
import { ms } from "./format.js";

const STAGES = [
  ["retrieve", "retrieve", "search for passages"],
  ["match", "match", "look for cached text in a plain prompt"],
  ["queue", "queue", "wait for other requests"],
  ["load", "load KV", "read, check, rotate and place cached KV"],
  ["select", "select", "choose the tokens to recompute"],
  ["correct", "correct", "correct reused KV"],
  ["compute", "compute", "forward pass of the model"],
  ["rest", "other", "tokenize, build the prompt, transfer"],
];

const MIN_SHARE = 0.002; // of the bar: a shorter stage would be invisible

/** Seconds by stage; their sum is the time to first token. */
export function stagesOf(timings) {
  const compute = timings.prefill - timings.load - timings.select - timings.correct;
  const rest = timings.ttft - timings.retrieve - timings.match - timings.queue - timings.prefill;
  return { ...timings, compute: Math.max(0, compute), rest: Math.max(0, rest) };
}

/** The bar. `scale`: seconds of its full width. */
export function stageBar(timings, scale = timings.ttft) {
  const seconds = stagesOf(timings);
  const shown = STAGES.filter(([name]) => seconds[name] > scale * MIN_SHARE);
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
