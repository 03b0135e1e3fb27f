// What the server is at, by its own metrics: looked at often while somebody looks, and now and then before.

import { text } from "./api.js";
import { makeChart } from "./chart.js";
import { el } from "./dom.js";
import { bytes, count, ms, percent } from "./format.js";
import { parse, quantile, sum } from "./prometheus.js";

const EVERY_MS = 2000;
const HIDDEN_MS = 10_000;
const SPAN_S = [60, 300]; // what a chart shows, at least and at most
const WINDOW_S = 20; // over which quantiles and rates are taken
const KINDS = ["exact", "reused", "recomputed", "missing", "suffix"];

const rate = (value) => `${value > 0 && value < 9.95 ? value.toFixed(1) : count(Math.round(value))}/s`;
const whole = (value) => count(Math.round(value));

/** [title, series, how it is shown, its values from the samples now, those before, and the seconds between] */
const CHARTS = [
  ["Requests", ["in slots", "waiting"], { shown: whole, most: 4 }, (now) => [sum(now, "blendserve_slots_in_use"), sum(now, "blendserve_queue_length")]],
  [
    "Time to first token",
    ["median", "95% below"],
    { shown: ms },
    (now, before) => [0.5, 0.95].map((q) => quantile(before, now, "blendserve_ttft_seconds", q)),
  ],
  [
    "Tokens of answers",
    ["generated"],
    { shown: rate, most: 1 },
    (now, before, seconds) => [grown(now, before, "blendserve_generated_tokens_total") / seconds],
  ],
  [
    "Tokens of prompts, by what was done for them",
    KINDS,
    { shown: rate, stacked: true, most: 1 },
    (now, before, seconds) => KINDS.map((kind) => grown(now, before, "blendserve_prompt_tokens_total", { kind }) / seconds),
  ],
  [
    "Chunks found, of those looked for",
    ["hit rate"],
    { shown: percent, most: 1 },
    (now, before) => {
      const hits = grown(now, before, "blendserve_chunks_total", { found: "hit" });
      const all = grown(now, before, "blendserve_chunks_total");
      return [all ? hits / all : null];
    },
  ],
  ["KV in the store", ["as stored", "uncoded"], { shown: bytes }, (now) => [sum(now, "blendserve_store_bytes"), sum(now, "blendserve_store_raw_bytes")]],
];

function grown(now, before, name, labels) {
  return Math.max(0, sum(now, name, labels) - sum(before, name, labels));
}

export function makeLoad(root) {
  const charts = CHARTS.map(([title, series, how]) => makeChart(title, series, how));
  const problem = el("p", { class: "problem", role: "status" });
  root.append(
    el("h2", { class: "visually-hidden" }, "Load"),
    el("p", { class: "muted" }, "Up to five minutes by the server's metrics, of all keys. Rates and quantiles are over 20 seconds."),
    problem,
    el("div", { class: "charts" }, ...charts.map((chart) => chart.element)),
  );
  let looks = []; // [{t, samples}]
  const points = CHARTS.map(() => []);
  let admin = false;
  let seen = false;
  let timer = null;

  async function look() {
    clearTimeout(timer);
    timer = setTimeout(look, seen ? EVERY_MS : HIDDEN_MS);
    if (!admin || document.hidden) return;
    try {
      const samples = parse(await text("metrics"));
      problem.textContent = "";
      note({ t: performance.now() / 1e3, samples });
    } catch (error) {
      problem.textContent = error.message;
    }
  }

  function note(now) {
    looks = [...looks.filter((each) => now.t - each.t < WINDOW_S), now];
    const before = looks[0];
    if (before === now) return;
    for (const [n, [, , , values]] of CHARTS.entries()) {
      points[n] = points[n].filter((point) => now.t - point.t < SPAN_S[1]);
      points[n].push({ t: now.t, values: values(now.samples, before.samples, now.t - before.t) });
      charts[n].update(points[n], Math.max(SPAN_S[0], now.t - points[n][0].t));
    }
  }

  return {
    settings({ key }) {
      admin = key.admin;
      problem.textContent = admin ? "" : "The metrics are about all keys: an admin's is needed to see them.";
      look();
    },
    show() {
      seen = true;
      look();
    },
    hide() {
      seen = false;
    },
  };
}
