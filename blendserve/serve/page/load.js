// The Load view: charts of the server's metrics, which it polls, more often while the view is open.

import { text } from "./api.js";
import { el, svg } from "./dom.js";
import { bytes, count, ms, percent, several } from "./format.js";

const POLL_MS = 2000;
const HIDDEN_POLL_MS = 10_000;
const SPAN_S = [60, 300]; // smallest and largest time span of a chart
const WINDOW_S = 20; // of quantiles and rates
const KINDS = ["exact", "reused", "recomputed", "missing", "suffix", "kept"]; // in the colours of .c0 to .c5

const rate = (value) => `${value > 0 && value < 9.95 ? value.toFixed(1) : count(Math.round(value))}/s`;
const requests = (value) => several(Math.round(value), "request");

/** [title, series, options of the chart, its values from the samples now and before, and the seconds between] */
const CHARTS = [
  ["Requests", ["running", "queued"], { shown: requests, most: 4 }, (now) => [sum(now, "blendserve_slots_in_use"), sum(now, "blendserve_queue_length")]],
  [
    "Time to first token",
    ["median", "95th percentile"],
    { shown: ms },
    (now, before) => [0.5, 0.95].map((q) => quantile(before, now, "blendserve_ttft_seconds", q)),
  ],
  [
    "Generated tokens per second",
    ["tokens"],
    { shown: rate, most: 1 },
    (now, before, seconds) => [seconds ? increase(now, before, "blendserve_generated_tokens_total") / seconds : null],
  ],
  [
    "Prompt tokens per second: cached or computed",
    KINDS,
    { shown: rate, stacked: true, most: 1 },
    (now, before, seconds) => KINDS.map((kind) => (seconds ? increase(now, before, "blendserve_prompt_tokens_total", { kind }) / seconds : null)),
  ],
  [
    "Chunk hit rate",
    ["hit rate"],
    { shown: percent, most: 1 },
    (now, before) => {
      const hits = increase(now, before, "blendserve_chunks_total", { found: "hit" });
      const all = increase(now, before, "blendserve_chunks_total");
      return [all ? hits / all : null];
    },
  ],
  ["KV in the store", ["stored", "decoded"], { shown: bytes }, (now) => [sum(now, "blendserve_store_bytes"), sum(now, "blendserve_store_raw_bytes")]],
];

function increase(now, before, name, labels) {
  return Math.max(0, sum(now, name, labels) - sum(before, name, labels));
}

export function makeLoad(root) {
  const charts = CHARTS.map(([title, series, how]) => makeChart(title, series, how));
  const problem = el("p", { class: "problem", role: "status" });
  root.append(
    el("h2", { class: "visually-hidden" }, "Load"),
    el("p", { class: "muted" }, "The last five minutes, for all API keys. Rates and quantiles cover 20 seconds."),
    problem,
    el("div", { class: "charts" }, ...charts.map((chart) => chart.element)),
  );
  let recent = []; // [{t, samples}]
  const points = CHARTS.map(() => []);
  let admin = false;
  let isOpen = false;
  let timer = null;

  async function poll() {
    clearTimeout(timer);
    timer = setTimeout(poll, isOpen ? POLL_MS : HIDDEN_POLL_MS);
    if (!admin || document.hidden) return;
    try {
      const samples = parse(await text("metrics"));
      problem.textContent = "";
      record({ t: performance.now() / 1e3, samples });
    } catch (error) {
      problem.textContent = error.message;
    }
  }

  function record(now) {
    recent = [...recent.filter((each) => now.t - each.t < WINDOW_S), now];
    const before = recent[0];
    for (const [n, [, , , values]] of CHARTS.entries()) {
      points[n] = points[n].filter((point) => now.t - point.t < SPAN_S[1]);
      points[n].push({ t: now.t, since: before.t, values: values(now.samples, before.samples, now.t - before.t) });
      charts[n].update(points[n], Math.max(SPAN_S[0], now.t - points[n][0].t));
    }
  }

  return {
    settings({ key }) {
      admin = key.admin;
      problem.textContent = admin ? "" : "Metrics cover all API keys: use an admin's key.";
      poll();
    },
    show() {
      isOpen = true;
      poll();
    },
    hide() {
      isOpen = false;
    },
  };
}

// Charts

const WIDTH = 600;
const HEIGHT = 140;

/** A chart over time: lines, or stacked areas. Each series has a colour, a dash pattern and a name.
 *
 * `series`: names. `shown`: a value as text. `update(points)`: [{since, t, values}], a value for each series; the times
 * are seconds, and a value is of the time between both: a lone point is a line, too. */
export function makeChart(title, series, { shown, stacked = false, most = null }) {
  const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": title });
  const top = el("span", { class: "axis muted" });
  const began = el("span");
  const nothing = el("span", { class: "nothing muted" }, "Nothing measured yet: ask a question.");
  const values = series.map(() => el("b", {}, "–"));
  const element = el(
    "figure",
    { class: "chart card" },
    el("figcaption", {}, title),
    top,
    el("div", { class: "plot" }, nothing, drawing),
    el("div", { class: "times muted" }, began, el("span", {}, "now")),
    el(
      "ul",
      { class: "series" },
      ...series.map((name, n) => el("li", {}, mark(n), el("span", {}, name), values[n])),
    ),
  );

  function update(points, span) {
    const last = points.at(-1);
    const now = last?.t ?? 0;
    const sums = points.map((point) => (stacked ? point.values.reduce((a, b) => a + (b ?? 0), 0) : Math.max(...point.values.map((v) => v ?? 0))));
    const highest = Math.max(most ?? 0, ...sums) || 1;
    const x = (t) => WIDTH * (1 - (now - t) / span);
    const y = (v) => HEIGHT - 2 - ((HEIGHT - 6) * v) / highest;
    nothing.hidden = points.some((point) => point.values.some((value) => value !== null));
    top.textContent = shown(highest);
    began.textContent = span < 120 ? `${Math.round(span)} s ago` : `${Math.round(span / 60)} min ago`;
    for (const [n, value] of values.entries()) value.textContent = last?.values[n] == null ? "–" : shown(last.values[n]);
    drawing.setAttribute("aria-label", `${title}: ${series.map((name, n) => `${name} ${values[n].textContent}`).join(", ")}`);
    drawing.replaceChildren(...(stacked ? areas(points, x, y) : lines(points, x, y)));
  }

  function lines(points, x, y) {
    return series.map((_, n) => {
      let path = "";
      let pen = "M";
      for (const { since, t, values } of points) {
        if (values[n] == null) {
          pen = "M";
          continue;
        }
        const height = y(values[n]).toFixed(1);
        if (pen === "M") path += `M${x(since).toFixed(1)} ${height}`;
        path += `L${x(t).toFixed(1)} ${height}`;
        pen = "L";
      }
      return svg("path", { d: path, class: `line c${n}` });
    });
  }

  function areas(shownPoints, x, y) {
    const points = shownPoints.slice(0, 1).map((first) => ({ ...first, t: first.since })).concat(shownPoints);
    const base = points.map(() => 0);
    return series.map((_, n) => {
      const low = points.map(({ t }, i) => `${x(t).toFixed(1)} ${y(base[i]).toFixed(1)}`);
      const high = points.map(({ t, values }, i) => `${x(t).toFixed(1)} ${y((base[i] += values[n] ?? 0)).toFixed(1)}`);
      return svg("path", { d: points.length ? `M${high.join("L")}L${low.reverse().join("L")}Z` : "", class: `area c${n}` });
    });
  }

  return { element, update };
}

function mark(n) {
  return svg("svg", { class: "mark", viewBox: "0 0 22 10", "aria-hidden": "true" }, svg("path", { d: "M0 5L22 5", class: `line c${n}` }));
}

// Prometheus' text format

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? ([^ ]+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** Samples by name: [{labels, value}]. */
export function parse(text) {
  const samples = new Map();
  for (const line of text.split("\n")) {
    const found = line.startsWith("#") ? null : line.match(LINE);
    if (!found) continue;
    const labels = Object.fromEntries([...(found[2] ?? "").matchAll(LABEL)].map(([, name, value]) => [name, value]));
    if (!samples.has(found[1])) samples.set(found[1], []);
    samples.get(found[1]).push({ labels, value: Number(found[3].replace("Inf", "Infinity")) });
  }
  return samples;
}

/** The sum of the samples of a metric that have these labels. */
function sum(samples, name, labels = {}) {
  return (samples.get(name) ?? [])
    .filter((sample) => Object.entries(labels).every(([key, value]) => sample.labels[key] === value))
    .reduce((total, sample) => total + sample.value, 0);
}

/** A quantile of a histogram's observations between two scrapes, interpolated within its bucket; null for none. */
export function quantile(before, after, name, q) {
  const countsOf = (samples) => {
    const buckets = new Map();
    for (const { labels, value } of samples.get(`${name}_bucket`) ?? []) {
      const le = labels.le === "+Inf" ? Infinity : Number(labels.le);
      buckets.set(le, (buckets.get(le) ?? 0) + value);
    }
    return buckets;
  };
  const old = countsOf(before);
  const counts = [...countsOf(after)].sort(([a], [b]) => a - b).map(([le, n]) => [le, n - (old.get(le) ?? 0)]);
  const total = counts.at(-1)?.[1] ?? 0;
  if (total <= 0) return null;
  let [low, below] = [0, 0];
  for (const [le, n] of counts) {
    if (n >= q * total) return le === Infinity ? low : low + ((le - low) * (q * total - below)) / (n - below);
    [low, below] = [le, n];
  }
  return low;
}
