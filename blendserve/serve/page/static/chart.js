// A small chart over time: lines, or areas on top of each other. Each series is told by colour, by dashes, and by name.

import { el, svg } from "./dom.js";

const WIDTH = 600;
const HEIGHT = 140;

/** `series`: names. `shown`: a value as text. `update(points)`: [{t, values}] in seconds, a value for each series. */
export function makeChart(title, series, { shown, stacked = false, most = null }) {
  const drawing = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": title });
  const top = el("span", { class: "axis muted" });
  const values = series.map(() => el("b", {}, "–"));
  const element = el(
    "figure",
    { class: "chart card" },
    el("figcaption", {}, title),
    el("div", { class: "plot" }, top, drawing),
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
    top.textContent = shown(highest);
    for (const [n, value] of values.entries()) value.textContent = last?.values[n] == null ? "–" : shown(last.values[n]);
    drawing.setAttribute("aria-label", `${title}: ${series.map((name, n) => `${name} ${values[n].textContent}`).join(", ")}`);
    drawing.replaceChildren(...(stacked ? areas(points, x, y) : lines(points, x, y)));
  }

  function lines(points, x, y) {
    return series.map((_, n) => {
      let path = "";
      let pen = "M";
      for (const { t, values } of points) {
        if (values[n] == null) {
          pen = "M";
          continue;
        }
        path += `${pen}${x(t).toFixed(1)} ${y(values[n]).toFixed(1)}`;
        pen = "L";
      }
      return svg("path", { d: path, class: `line c${n}` });
    });
  }

  function areas(points, x, y) {
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
