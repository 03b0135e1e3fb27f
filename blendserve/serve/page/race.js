// One question with every method: the requests run one after another; a replay shows them side by side.

import { events } from "./api.js";
import { el } from "./dom.js";
import { count, ms, times } from "./format.js";
import { stageBar } from "./stages.js";

const LANES = [
  ["full", "Full prefill", "computes all tokens"],
  ["prefix", "Prefix caching", "reuses the common prefix"],
  ["reuse", "Full reuse", "reuses all cached tokens"],
  ["blend", "Blend", "recomputes selected tokens"],
];

export function makeRace(root) {
  let lanes = [];
  let playing = 0;
  const replay = el("button", { type: "button", hidden: true, onclick: () => play() }, "Replay side by side");

  /** Send the question with each method. Throws the errors of a request. */
  async function run(body, signal) {
    playing += 1;
    replay.hidden = true;
    lanes = LANES.map(makeLane);
    root.replaceChildren(
      el("div", { class: "headline" }, el("h2", {}, "The same question with every method"), replay),
      el("p", { class: "muted" }, "The requests run one after another. Each clock starts with its request."),
      el("div", { class: "lanes" }, ...lanes.map((lane) => lane.element)),
    );
    for (const lane of lanes) await lane.run(body, signal);
    const base = lanes[0].ttft;
    const longest = Math.max(...lanes.map((lane) => lane.ttft));
    for (const lane of lanes) lane.conclude(base, longest);
    replay.hidden = false;
  }

  /** Replay all answers from a common start. */
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
  const clock = el("b", { class: "clock" }, "waiting");
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
  let pieces = []; // [milliseconds, text so far]
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
            pieces.push([performance.now() - start, said]);
            if (pieces.length === 1) clearInterval(ticking);
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
        el("p", {}, el("b", { class: "speed" }, times(base / timings.ttft)), ` speedup over full prefill, ${count(run)} of ${count(report.tokens_prompt)} tokens computed`),
        ...(missing ? [el("p", { class: "hint" }, `${count(missing)} of its passages were not cached: warm them and compare again.`)] : []),
      );
    },
    /** Show the lane's state after `now` milliseconds -> whether more follows. */
    at(now) {
      const last = pieces.findLast(([when]) => when <= now);
      text.textContent = last ? last[1] : "";
      clock.textContent = last ? ms(end.timings.ttft) : ms(now / 1e3);
      element.classList.toggle("running", !last);
      const over = now > (pieces.at(-1)?.[0] ?? 0);
      if (over) text.textContent = end.text;
      return !over;
    },
  };
}
