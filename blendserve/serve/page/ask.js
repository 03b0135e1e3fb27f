// The Ask view: a question, its answer as it streams, and how its prompt was prefilled.

import { events, post } from "./api.js";
import { el } from "./dom.js";
import { count, ms, percent, qualityText, several } from "./format.js";
import { makeRace } from "./race.js";
import { stageView } from "./stages.js";
import { plainView, tokenView } from "./tokens.js";

const METHODS = {
  auto: "auto: the fastest",
  full: "full prefill",
  prefix: "prefix caching",
  reuse: "full reuse",
  blend: "blend",
};
const USES_RATIO = new Set(["auto", "blend"]);

export function makeAsk(root) {
  const question = el("textarea", { id: "question", rows: "2", maxlength: "20000", placeholder: "What does the with statement do?" });
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
  const status = el("p", { class: "visually-hidden", role: "status" });
  const answer = el("div", { id: "answer", class: "answer", "aria-live": "polite" });
  const problem = el("div", { class: "problem", role: "alert" });
  const facts = el("div", { id: "facts" });
  const prompt = el("section", { id: "prompt", class: "card", hidden: true, "aria-label": "The prompt" });
  const left = el("section", { class: "card", hidden: true, "aria-label": "The answer" }, answer, facts);
  const raced = el("section", { id: "race", class: "card", hidden: true, "aria-label": "Comparison of methods" });
  const race = makeRace(raced);
  let defaults = {};
  let isRatioSet = false;
  let running = null;

  const form = el(
    "form",
    { class: "card asking" },
    el("div", { class: "field wide" }, el("label", { for: "question" }, "Question"), question),
    el(
      "div",
      { class: "controls" },
      el("div", { class: "field" }, el("label", { for: "method" }, "Method"), method),
      el("div", { class: "field ratio" }, el("label", { for: "ratio" }, "Recompute ratio ", shown), ratio),
      el("div", { class: "field" }, el("label", { for: "top-k" }, "Passages"), topK),
      el("div", { class: "field" }, el("label", { title: plainHelp }, plain, " Plain prompt")),
      collections,
      el("div", { class: "actions" }, stop, compare, ask),
    ),
  );
  root.append(form, status, problem, raced, el("div", { class: "two" }, left, prompt));

  /** A request's fields except its method. */
  function body() {
    const names = [...collections.querySelectorAll("input:checked")].map((box) => box.value);
    return {
      question: question.value.trim(),
      top_k: Number(topK.value) || defaults.top_k,
      ...(collections.hidden ? {} : { collections: names }),
      ...(plain.checked ? { plain: true } : {}),
      ...(isRatioSet ? { ratio: Number(ratio.value) } : {}),
      stream: true,
    };
  }

  async function run(work) {
    running?.abort();
    const mine = (running = new AbortController());
    stop.hidden = false;
    problem.replaceChildren();
    try {
      await work(mine.signal);
    } catch (error) {
      if (error.name !== "AbortError") problem.replaceChildren(error.message);
      status.textContent = error.name === "AbortError" ? "Stopped." : "";
      answer.querySelector(".waiting")?.replaceWith("");
    } finally {
      if (running === mine) {
        stop.hidden = true;
        running = null;
      }
      answer.setAttribute("aria-busy", "false");
    }
  }

  async function submit(signal) {
    const asked = { ...body(), method: method.value, explain: true };
    let passages = [];
    let text = "";
    raced.hidden = true;
    left.hidden = prompt.hidden = false;
    answer.replaceChildren(el("span", { class: "waiting" }, "Retrieving passages …"));
    answer.setAttribute("aria-busy", "true");
    facts.replaceChildren();
    prompt.replaceChildren();
    status.textContent = "The question is sent.";
    for await (const event of events("v1/rag/query", asked, signal)) {
      if (event.event === "passages") {
        passages = event.passages;
        answer.replaceChildren(el("span", { class: "waiting" }, "Prefill …"));
        if (passages.length) prompt.replaceChildren(heading("Passages"), plainView(passages));
      } else if (event.event === "prefill") {
        prompt.replaceChildren(heading("The prompt, token by token"), tokenView(event.explanation, passages, event.report));
      } else if (event.event === "text") {
        text += event.text;
        answer.replaceChildren(text);
      } else {
        answer.replaceChildren(event.text || el("span", { class: "muted" }, "The answer is empty."));
        facts.replaceChildren(...answerFacts(event), checkView(asked));
        status.textContent = `The answer is complete. Time to first token: ${ms(event.timings.ttft)}.`;
      }
    }
  }

  /** The time to first token and the report's figures. */
  function answerFacts({ report, timings, tokens, cached_tokens: cached, passages, finish_reason: end }) {
    const recomputed = report.blended
      ? `${several(report.tokens_recomputed, "token")} recomputed, ${percent(report.share_recomputed)} of the cached ones.`
      : `Not blended: ${report.reason}.`;
    return [
      el("h2", {}, "Time to first token ", el("b", { id: "ttft" }, ms(timings.ttft))),
      stageView(timings),
      el(
        "ul",
        { class: "facts" },
        el("li", {}, `${percent(cached / report.tokens_prompt)} of ${several(report.tokens_prompt, "token")} reused from the cache.`),
        el("li", {}, recomputed),
        el("li", {}, `${several(tokens, "token")} generated, ${timings.tokens_per_second.toFixed(0)} per second${end === "length" ? ", up to max_tokens" : ""}.`),
        report.correction && report.blended ? el("li", {}, `Policy ${report.policy}, correction ${report.correction}, ratio ${report.ratio}.`) : null,
        report.quality ? el("li", { id: "quality" }, qualityText(report.quality)) : null,
      ),
      ...(report.chunks_missing && passages.length ? [missing(report, passages)] : []),
    ];
  }

  /** A button that asks again and compares the answer with full prefill's choices. */
  function checkView(asked) {
    const button = el("button", { type: "button" }, "Check this answer");
    const view = el("div", { id: "check", class: "hint" }, button);
    button.addEventListener("click", () =>
      run(async (signal) => {
        button.disabled = true;
        status.textContent = "The answer is compared with full prefill.";
        const { check } = await post("v1/rag/query", { ...asked, explain: false, stream: false, check: true }, signal);
        const tokens = check.tokens.map(([text, full]) => (full === null ? text : el("mark", { title: `full prefill: ${full}` }, text)));
        const said = `Full prefill would have chosen ${percent(check.agreement)} of these tokens; mean KL ${check.kl.toFixed(3)} nats.`;
        view.replaceChildren(said, el("p", {}, ...tokens));
        status.textContent = said;
      }),
    );
    return view;
  }

  /** A hint about passages that were not cached, with a button that warms them. */
  function missing(report, passages) {
    const warm = el("button", { type: "button" }, "Warm");
    warm.addEventListener("click", async () => {
      warm.disabled = true;
      try {
        await post("v1/cache/warm", { passages: passages.map(({ text, title, id }) => ({ text, title, id })) });
        warm.textContent = "Warming started: ask again";
      } catch (error) {
        warm.textContent = error.message;
      }
    });
    return el("p", { class: "hint" }, `${several(report.chunks_missing, "passage")} not cached. `, warm);
  }

  function showRatio() {
    const unused = !USES_RATIO.has(method.value);
    ratio.disabled = unused;
    shown.textContent = isRatioSet || typeof defaults.ratio === "number" ? percent(Number(ratio.value)) : "auto";
    if (unused) shown.textContent = "–";
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (question.value.trim()) run(submit);
    else question.focus();
  });
  question.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
  compare.addEventListener("click", () => {
    if (!question.value.trim()) return question.focus();
    left.hidden = prompt.hidden = true;
    raced.hidden = false;
    run(async (signal) => {
      status.textContent = "Running the methods one after another.";
      await race.run(body(), signal);
      status.textContent = "The comparison is complete.";
    });
  });
  stop.addEventListener("click", () => running?.abort());
  method.addEventListener("change", showRatio);
  ratio.addEventListener("input", () => {
    isRatioSet = true;
    showRatio();
  });
  ratio.addEventListener("change", () => {
    if (!left.hidden && question.value.trim()) run(submit);
  });

  return {
    settings(settings) {
      if (!method.options.length) {
        defaults = settings.defaults;
        for (const name of settings.methods) method.append(el("option", { value: name }, METHODS[name] ?? name));
        method.value = defaults.method;
        ratio.value = typeof defaults.ratio === "number" ? defaults.ratio : 0.15;
        topK.value = defaults.top_k;
        plain.checked = !settings.collections.length;
      }
      choices(collections, settings.collections);
      showRatio();
    },
  };
}

function heading(text) {
  return el("h2", {}, text);
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
