// The Ask view: a question and its options, the race of methods, the answer, and follow-up questions.

import { events } from "./api.js";
import { makeAnswer } from "./answer.js";
import { el } from "./dom.js";
import { count, percent, several } from "./format.js";
import { makeLanding } from "./landing.js";
import { makeRace, METHODS as RACED } from "./race.js";

const METHODS = {
  auto: "auto: the fastest",
  full: "full prefill",
  prefix: "prefix caching",
  reuse: "full reuse",
  blend: "blend",
};
const USES_RATIO = new Set(["auto", "blend"]);

export function makeAsk(root) {
  const question = el("textarea", { id: "question", rows: "1", maxlength: "20000", placeholder: "Ask a question", "aria-label": "Question" });
  const method = el("select", { id: "method" });
  const ratio = el("input", { id: "ratio", type: "range", min: "0", max: "1", step: "0.01" });
  const shown = el("output", { for: "ratio" });
  const topK = el("input", { id: "top-k", type: "number", min: "1", max: "1000" });
  const plain = el("input", { id: "plain", type: "checkbox" });
  const plainHelp = "The question is the whole prompt: cached text is found in it, and nothing is retrieved.";
  const collections = el("div", { class: "field", hidden: true });
  const ask = el("button", { class: "primary", type: "submit" }, "Ask");
  const stop = el("button", { type: "button", hidden: true }, "Stop");
  const compare = el("button", { type: "button" }, "Compare methods");
  const options = el("button", { type: "button", class: "quiet", id: "options-button", "aria-expanded": "false", "aria-controls": "options" }, "Options");
  const status = el("p", { class: "visually-hidden", role: "status" });
  const problem = el("div", { class: "problem", role: "alert" });
  const start = el("section", { id: "landing", class: "landing", "aria-label": "Start" });
  const raced = el("section", { id: "race", class: "card", hidden: true, "aria-label": "Comparison of methods" });
  const answered = el("div", { class: "two", hidden: true });
  const race = makeRace(raced);
  const view = makeAnswer(answered, { run, follow: (text) => submit(text, view.turns()) });
  const colours = el("dl", { class: "colours", "aria-label": "What the colours of tokens mean" });
  const landing = makeLanding(start, colours, (text) => {
    question.value = text;
    compete(["full", "blend"]);
  });
  let defaults = null;
  let isRatioSet = false;
  let running = null;
  let again = () => {}; // asks the current question once more

  const settings = el(
    "div",
    { class: "controls", id: "options", hidden: true },
    el("div", { class: "field" }, el("label", { for: "method" }, "Method"), method),
    el("div", { class: "field ratio" }, el("label", { for: "ratio" }, "Recompute ratio ", shown), ratio),
    el("div", { class: "field" }, el("label", { for: "top-k" }, "Passages"), topK),
    el("div", { class: "field" }, el("label", { title: plainHelp }, plain, " Plain prompt")),
    collections,
  );
  const form = el(
    "form",
    { class: "card asking" },
    question,
    el("div", { class: "actions" }, options, stop, compare, ask),
    settings,
  );
  root.append(start, form, status, problem, colours, raced, answered);

  /** A request's fields except its method. */
  function body(text, before = []) {
    const names = [...collections.querySelectorAll("input:checked")].map((box) => box.value);
    const messages = before.flatMap((turn) => [
      { role: "user", content: turn.question },
      { role: "assistant", content: turn.text },
    ]);
    return {
      question: text,
      top_k: Number(topK.value) || defaults.top_k,
      ...(messages.length ? { history: messages } : {}),
      ...(collections.hidden ? {} : { collections: names }),
      ...(plain.checked ? { plain: true } : {}),
      ...(isRatioSet ? { ratio: Number(ratio.value) } : {}),
      stream: true,
    };
  }

  /** Run a request that can be stopped, after stopping the one that runs. What `work` returns is announced. */
  async function run(work) {
    running?.abort();
    const mine = (running = new AbortController());
    stop.hidden = false;
    start.hidden = colours.hidden = true;
    problem.replaceChildren();
    try {
      status.textContent = await work(mine.signal);
    } catch (error) {
      if (error.name !== "AbortError") problem.replaceChildren(error.message);
      status.textContent = error.name === "AbortError" ? "Stopped." : "";
    } finally {
      if (running === mine) {
        stop.hidden = true;
        running = null;
        view.end();
      }
    }
  }

  /** Answer one question. `before`: the turns before it. */
  function submit(text, before = []) {
    again = () => submit(text, before);
    return run(async (signal) => {
      const asked = { ...body(text, before), method: method.value, explain: true };
      raced.hidden = true;
      view.begin(asked, before);
      status.textContent = "The question is sent.";
      for await (const event of events("v1/rag/query", asked, signal)) view.show(event);
      return "The answer is complete.";
    });
  }

  /** Answer the question by each of these methods; then show the answer of the last one as any other. */
  function compete(methods) {
    const text = question.value.trim();
    if (!text) return question.focus();
    again = () => submit(text);
    return run(async (signal) => {
      const asked = { ...body(text), max_tokens: defaults.max_tokens };
      answered.hidden = true;
      raced.hidden = false;
      status.textContent = "The methods run one after another.";
      const heard = await race.run(methods, asked, signal);
      view.begin({ ...asked, method: "blend" }, []);
      for (const event of heard) view.show(event);
      return race.result();
    });
  }

  function showRatio() {
    const unused = !USES_RATIO.has(method.value);
    ratio.disabled = unused;
    shown.textContent = isRatioSet || typeof defaults.ratio === "number" ? percent(Number(ratio.value)) : "auto";
    if (unused) shown.textContent = "–";
    const source = plain.checked ? "plain prompt" : several(Number(topK.value), "passage");
    options.replaceChildren("Options", el("span", { class: "detail" }, `: ${method.value}, ${source}`));
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (question.value.trim()) submit(question.value.trim());
    else question.focus();
  });
  question.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
  compare.addEventListener("click", () => compete(RACED));
  stop.addEventListener("click", () => running?.abort());
  options.addEventListener("click", () => {
    settings.hidden = !settings.hidden;
    options.setAttribute("aria-expanded", String(!settings.hidden));
  });
  for (const input of [method, topK, plain]) input.addEventListener("change", showRatio);
  ratio.addEventListener("input", () => {
    isRatioSet = true;
    showRatio();
  });
  ratio.addEventListener("change", () => answered.hidden || again());

  return {
    settings(settings) {
      if (!defaults) {
        defaults = settings.defaults;
        for (const name of settings.methods) method.append(el("option", { value: name }, METHODS[name] ?? name));
        method.value = defaults.method;
        ratio.value = typeof defaults.ratio === "number" ? defaults.ratio : 0.15;
        topK.value = defaults.top_k;
        plain.checked = !settings.collections.length;
      }
      choices(collections, settings.collections);
      showRatio();
      landing.fill(settings.collections).catch((error) => problem.replaceChildren(error.message));
    },
  };
}

/** The collections to search, if there are several. */
function choices(field, all) {
  field.hidden = all.length < 2;
  const off = new Set([...field.querySelectorAll("input:not(:checked)")].map((box) => box.value));
  field.replaceChildren(
    el("span", { class: "label", id: "collections-label" }, "Collections"),
    el(
      "div",
      { class: "checks", role: "group", "aria-labelledby": "collections-label" },
      ...all.map(({ name, passages }) =>
        el("label", {}, el("input", { type: "checkbox", value: name, checked: !off.has(name) }), ` ${name} (${count(passages)})`),
      ),
    ),
  );
}
