// One question by every method: measured one after the other, so that none waits for another, then played side by side.

import { events } from "./api.js";
import { el } from "./dom.js";
import { count, ms, times } from "./format.js";
import { stageBar } from "./stages.js";

const LANES = [
  ["full", "Full prefill", "computes every token"],
  ["prefix", "Prefix caching", "reuses what stands first"],
  ["reuse", "Full reuse", "recomputes nothing"],
  ["blend", "Blending", "recomputes what matters"],
];

export function makeRace(root) {
  let lanes = [];
  let playing = 0;
  const replay = el("button", { type: "button", hidden: true, onclick: () => play() }, "Play it side by side");

  /** Ask by each method in turn. Throws what a request throws. */
  async function run(body, signal) {
    playing += 1;
    replay.hidden = true;
    lanes = LANES.map(makeLane);
    root.replaceChildren(
      el("div", { class: "headline" }, el("h2", {}, "The same question by every method"), replay),
      el("p", { class: "muted" }, "Each is measured alone, one after the other; the clock starts with its own request."),
      el("div", { class: "lanes" }, ...lanes.map((lane) => lane.element)),
    );
    for (const lane of lanes) await lane.run(body, signal);
    const base = lanes[0].ttft;
    const longest = Math.max(...lanes.map((lane) => lane.ttft));
    for (const lane of lanes) lane.conclude(base, longest);
    replay.hidden = false;
  }

  /** What came when, once more, from one start. */
  function play() {
    const mine = (playing += 1);
    const start = performance.now();
    const step = () => {
      if (mine !== playing) return;
      const now = performance.now() - start;
      if (lanes.map((lane) => lane.at(now)).some(Boolean)) requestAnimationFrame(step);
    };
    requestAnimationFrame(step);
  }

  return { run };
}

function makeLane([method, name, about]) {
  const clock = el("b", { class: "clock" }, "waits for its turn");
  const text = el("div", { class: "said" });
  const result = el("div", { class: "result" });
  const element = el(
    "article",
    { class: "lane", "data-method": method },
    el("header", {}, el("h3", {}, name), el("p", { class: "muted" }, about)),
    clock,
    result,
    text,
  );
  let heard = []; // [milliseconds, all of the text so far]
  let end = null;

  return {
    element,
    get ttft() {
      return end.timings.ttft;
    },
    async run(body, signal) {
      const { ratio, ...rest } = body;
      const asked = { ...rest, method, ...(method === "blend" && ratio !== undefined ? { ratio } : {}) };
      const start = performance.now();
      const ticking = setInterval(() => (clock.textContent = ms((performance.now() - start) / 1e3)), 50);
      element.classList.add("running");
      let said = "";
      try {
        for await (const event of events("v1/rag/query", asked, signal)) {
          if (event.event === "text") {
            said += event.text;
            heard.push([performance.now() - start, said]);
            if (heard.length === 1) clearInterval(ticking);
            text.textContent = said;
          } else if (event.event === "done") {
            end = event;
          }
        }
      } finally {
        clearInterval(ticking);
        element.classList.remove("running");
      }
      text.textContent = end.text;
      clock.textContent = ms(end.timings.ttft);
    },
    conclude(base, longest) {
      const { report, timings } = end;
      const run = report.tokens_computed + report.tokens_recomputed + report.tokens_suffix;
      const missing = method !== "full" && report.chunks_missing;
      result.replaceChildren(
        el("div", { class: "track" }, stageBar(timings, longest)),
        el("p", {}, el("b", { class: "speed" }, times(base / timings.ttft)), ` as fast as full prefill, ${count(run)} of ${count(report.tokens_prompt)} tokens computed`),
        ...(missing ? [el("p", { class: "hint" }, `${count(missing)} of its passages had no KV yet: warm them, and compare again.`)] : []),
      );
    },
    /** The lane as it was after so many milliseconds -> whether something is still to come. */
    at(now) {
      const last = heard.findLast(([when]) => when <= now);
      text.textContent = last ? last[1] : "";
      clock.textContent = last ? ms(end.timings.ttft) : ms(now / 1e3);
      element.classList.toggle("running", !last);
      const over = now > (heard.at(-1)?.[0] ?? 0);
      if (over) text.textContent = end.text;
      return !over;
    },
  };
}
