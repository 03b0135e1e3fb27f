// One question by several methods, side by side. The requests run one after another, so that none slows another: all but
// the last are recorded, and replayed beside the last one, from a common start.

import { events } from "./api.js";
import { el } from "./dom.js";
import { makeField } from "./field.js";
import { count, ms, several, times } from "./format.js";
import { IS_COMPUTED, STATES, statesOf } from "./states.js";
import { compareWords } from "./words.js";

const LANES = {
  full: ["Full prefill", "computes every token"],
  prefix: ["Prefix caching", "reuses the prefix"],
  reuse: ["Full reuse", "reuses all cached tokens"],
  blend: ["Blended", "recomputes selected tokens"],
};
export const METHODS = Object.keys(LANES); // the slowest first: it runs last
const SHOWN = ["exact", "reused", "recomputed", "computed"];
const MAX_TOKENS = 64; // of an answer
const TICK_MS = 50;

export function makeRace(root) {
  let lanes = [];
  let playing = 0;
  const title = el("h2", { id: "race-result" });
  const note = el("p", { class: "muted" });
  const replay = el("button", { type: "button", hidden: true }, "Replay");
  replay.addEventListener("click", () => show());

  /** Send the question by each of `methods`, the first one last. Returns the events of the last method, `blend`.
   * Throws the errors of a request. */
  async function run(methods, body, signal) {
    playing += 1;
    replay.hidden = true;
    lanes = methods.map(makeLane);
    title.textContent = body.question;
    note.textContent = "Each request runs alone, so that none slows another.";
    root.replaceChildren(
      el("div", { class: "headline" }, title, replay),
      note,
      el("div", { class: "lanes" }, ...lanes.map((lane) => lane.element)),
      el("ul", { class: "swatches" }, ...SHOWN.map((state) => el("li", {}, el("i", { class: `swatch s-${state}` }), STATES[state][0]))),
    );
    for (const lane of lanes) lane.size();
    const asked = { ...body, explain: true, max_tokens: Math.min(MAX_TOKENS, body.max_tokens) };
    const [last, ...others] = lanes;
    for (const lane of others.toReversed()) await lane.record(asked, signal, true);
    note.textContent = `${LANES[methods[0]][0]} runs now; what ran before is replayed beside it. Tokens fill as layers of the model end.`;
    try {
      await Promise.all([last.record(asked, signal), show()]);
    } catch (error) {
      playing += 1; // ends the replay
      throw error;
    }
    note.textContent = "Each request ran alone, and all are shown from a common start.";
    replay.hidden = false;
    return lanes.at(-1).events;
  }

  /** Show all lanes from a common start, and what came of it. */
  async function show() {
    const mine = (playing += 1);
    const start = performance.now();
    title.textContent = "Full prefill and blended, side by side";
    await new Promise((resolve) => {
      const step = () => {
        const now = performance.now() - start;
        if (mine === playing && lanes.map((lane) => lane.show(now)).some(Boolean)) requestAnimationFrame(step);
        else resolve();
      };
      step();
    });
    if (mine !== playing) return;
    const [base, ...others] = lanes;
    if (others.length > 1) base.conclude("the baseline");
    for (const lane of others) {
      const words = compareWords(base.text, lane.text);
      const speed = sooner(base.ttft / lane.ttft);
      title.textContent = `${speed}, ${agreement(words)}`; // at last, of blending
      lane.conclude(others.length > 1 ? speed : "");
      lane.mark(words.other);
      base.mark(words.one);
    }
  }

  return { run, result: () => title.textContent };
}

function sooner(factor) {
  return factor >= 1 ? `${times(factor)} sooner` : `${times(1 / factor)} later`;
}

function agreement({ equal, areEqual }) {
  if (areEqual) return "answers equal";
  return equal ? `answers equal up to word ${count(equal)}` : "answers differ from the first word on";
}

function makeLane(method) {
  const [name, about] = LANES[method];
  const clock = el("b", { class: "clock" }, "–");
  const counted = el("p", { class: "counted" });
  const result = el("p", { class: "muted result" });
  const said = el("div", { class: "said" });
  const bar = el("div", { role: "progressbar", "aria-label": `Prefill: ${name}`, "aria-valuemin": "0", "aria-valuemax": "100" });
  const element = el(
    "article",
    { class: "lane", "data-method": method },
    el("header", {}, el("h3", {}, name, el("span", { class: "muted" }, ` ${about}`)), clock),
    bar,
    counted,
    result,
    said,
  );
  let field = null;
  let heard = []; // [milliseconds since the request, event]
  let end = null; // the last event
  let computed = []; // the number of tokens that ran through the model, up to each token

  function setStates(states) {
    let n = 0;
    computed = [0, ...states.map((state) => (n += IS_COMPUTED.has(state)))];
    field.set(states);
  }

  function hear(event, when) {
    heard.push([when, event]);
    if (event.event === "passages" && method === "full") setStates(Array(event.tokens).fill("computed"));
    else if (event.event === "prefill") setStates(statesOf(event.explanation.states));
    else if (event.event === "done") end = event;
  }

  /** Layers of all passes, as far as they are known. */
  function layersInAll() {
    return Math.max(1, ...heard.map(([, event]) => (event.event === "progress" ? Math.max(event.n_layers, event.layers + 1) : 0)));
  }

  return {
    element,
    get ttft() {
      return end.timings.ttft;
    },
    get text() {
      return end.text;
    },
    get events() {
      return heard.map(([, event]) => event);
    },
    size() {
      field = makeField(bar.clientWidth);
      bar.replaceChildren(field.element);
    },
    /** Send the request and keep its events. `isAlone`: nothing is replayed meanwhile, so the lane shows the time. */
    async record({ ratio, ...body }, signal, isAlone = false) {
      const asked = { ...body, method, ...(method === "blend" && ratio !== undefined ? { ratio } : {}) };
      const start = performance.now();
      const elapsed = () => performance.now() - start;
      const ticking = isAlone && setInterval(() => (clock.textContent = ms(elapsed() / 1e3)), TICK_MS);
      element.classList.add("running");
      try {
        for await (const event of events("v1/rag/query", asked, signal)) hear(event, elapsed());
      } finally {
        clearInterval(ticking);
        element.classList.remove("running");
      }
    },
    /** Show the lane as it was `now` milliseconds after its request -> whether more follows. */
    show(now) {
      const seen = heard.filter(([when]) => when <= now);
      const texts = seen.filter(([, event]) => event.event === "text");
      const layers = seen.findLast(([, event]) => event.event === "progress")?.[1].layers ?? 0;
      const share = seen.some(([, event]) => event.event === "prefill") ? 1 : layers / layersInAll();
      const n = computed[Math.floor(share * (computed.length - 1))] ?? 0;
      const first = end ? end.timings.ttft * 1e3 : texts[0]?.[0];
      field.fill(share);
      bar.setAttribute("aria-valuenow", Math.round(100 * share));
      counted.textContent = `${several(n, "token")} computed`;
      clock.textContent = ms(Math.min(now, first ?? Infinity) / 1e3);
      element.classList.toggle("running", !(first <= now));
      said.textContent = texts.map(([, event]) => event.text).join("");
      result.textContent = "";
      return !end || now < heard.at(-1)[0];
    },
    /** Its speed, and how much of the prompt was not cached. */
    conclude(speed) {
      const missing = method !== "full" && end.report.chunks_missing;
      result.textContent = [speed, missing && `${several(missing, "passage")} not cached yet`].filter(Boolean).join("; ");
    },
    /** Show the text as [word with the white space before it, whether it differs]; neighbours that differ are one mark. */
    mark(words) {
      said.replaceChildren();
      for (const [word, differs] of words) {
        const [, space, letters] = word.match(/^(\s*)(.*)$/s);
        const last = said.lastChild;
        if (differs && last?.nodeName === "MARK") last.append(word);
        else said.append(space, differs ? el("mark", {}, letters) : letters);
      }
    },
  };
}
