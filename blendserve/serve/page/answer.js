// One answer as it streams, the turns before it, how long it took against full prefill, and its prompt token by token.

import { post } from "./api.js";
import { el } from "./dom.js";
import { about, count, ms, percent, several } from "./format.js";
import { mark, markdown } from "./markdown.js";
import { stageView } from "./stages.js";
import { plainView, tokenView } from "./tokens.js";

/** `run(work)` runs a request that can be stopped; `follow(question)` asks in the same conversation. */
export function makeAnswer(root, { run, follow }) {
  const turns = el("div", { class: "turns" });
  const answer = el("div", { id: "answer", class: "prose", "aria-live": "polite" });
  const facts = el("div", { id: "facts" });
  const next = el("input", { id: "follow", type: "text", maxlength: "20000", placeholder: "Ask a follow-up question", "aria-label": "Follow-up question", autocomplete: "off" });
  const following = el("form", { class: "follow", hidden: true }, next, el("button", { type: "submit", "aria-label": "Ask the follow-up" }, "Ask"));
  const prompt = el("section", { id: "prompt", class: "card", hidden: true, "aria-label": "The prompt" });
  let asked = {};
  let history = [];
  let text = "";
  let passages = [];

  root.replaceChildren(el("section", { class: "card", "aria-label": "The answer" }, turns, answer, following, facts), prompt);
  following.addEventListener("submit", (event) => {
    event.preventDefault();
    const question = next.value.trim();
    if (question) follow(question);
  });

  /** `body`: of the request. `before`: the turns before it, each {question, text}. */
  function begin(body, before) {
    [asked, history, text, passages] = [body, before, "", []];
    const said = before.map((turn) => [question(turn.question), el("div", { class: "prose" }, ...markdown(turn.text))]);
    turns.replaceChildren(...said.flat(), question(body.question));
    wait("Retrieving passages …");
    answer.setAttribute("aria-busy", "true");
    facts.replaceChildren();
    prompt.replaceChildren();
    prompt.hidden = following.hidden = true;
    next.value = "";
    root.hidden = false;
  }

  function wait(what) {
    answer.replaceChildren(el("p", { class: "waiting" }, what));
  }

  function show(event) {
    if (event.event === "passages") {
      passages = event.passages;
      wait("Prefill …");
      if (passages.length) showPrompt("Passages", plainView(passages));
    } else if (event.event === "progress") {
      wait(`Prefill: ${count(event.layers)} layers of ${count(event.n_layers)} …`);
    } else if (event.event === "prefill") {
      showPrompt("The prompt, token by token", tokenView(event.explanation, passages, event.report));
    } else if (event.event === "text") {
      text += event.text;
      answer.replaceChildren(...markdown(text));
    } else if (event.event === "done") {
      text = event.text;
      answer.replaceChildren(...(text.trim() ? cited(event) : [el("p", { class: "muted" }, "The answer is empty.")]));
      facts.replaceChildren(...answerFacts(event), checkView());
      following.hidden = false;
    }
  }

  function showPrompt(title, view) {
    prompt.hidden = false;
    prompt.replaceChildren(el("h2", {}, title), view);
  }

  /** The request has ended, as it should or not. */
  function end() {
    answer.querySelector(".waiting")?.remove();
    answer.setAttribute("aria-busy", "false");
  }

  /** The time to first token, what full prefill would take, and the report's figures. */
  function answerFacts({ report, timings, tokens, cached_tokens: cached, finish_reason: reason }) {
    const rest = timings.ttft - timings.prefill;
    const estimate = report.full_prefill_s === null ? "" : `; full prefill would take about ${about(report.full_prefill_s + rest)}`;
    return [
      el("p", { class: "ttft" }, el("b", { id: "ttft" }, ms(timings.ttft)), el("span", {}, estimate || " to the first token")),
      stageView(timings),
      el(
        "ul",
        { class: "facts" },
        el("li", {}, `${percent(cached / report.tokens_prompt)} of ${several(report.tokens_prompt, "token")} reused from the cache.`),
        el("li", { id: "exactness", "data-exact": String(report.exact) }, exactness(report)),
        el("li", {}, `${several(tokens, "token")} generated, ${timings.tokens_per_second.toFixed(0)} per second${reason === "length" ? ", up to max_tokens" : ""}.`),
        report.correction && report.blended ? el("li", {}, `Policy ${report.policy}, correction ${report.correction}, ratio ${report.ratio}.`) : null,
        report.quality ? el("li", { id: "quality" }, report.quality.summary) : null,
      ),
      ...(report.chunks_missing && passages.length ? [missing(report)] : []),
    ];
  }

  /** A button that asks again and compares the answer with full prefill's choices. */
  function checkView() {
    const button = el("button", { type: "button" }, "Check this answer");
    const view = el("div", { id: "check", class: "hint" }, button);
    button.addEventListener("click", () =>
      run(async (signal) => {
        button.disabled = true;
        const { check } = await post("v1/rag/query", { ...asked, explain: false, stream: false, check: true }, signal);
        const tokens = check.tokens.map(([said, full]) => (full === null ? said : el("mark", { title: `full prefill: ${full}` }, said)));
        const result = `Full prefill would have chosen ${percent(check.agreement)} of these tokens; mean KL ${check.kl.toFixed(3)} nats.`;
        view.replaceChildren(result, el("p", {}, ...tokens));
        return result;
      }),
    );
    return view;
  }

  /** A hint about passages that were not cached, with a button that caches them. */
  function missing(report) {
    const button = el("button", { type: "button" }, "Cache these passages");
    button.addEventListener("click", async () => {
      button.disabled = true;
      try {
        await post("v1/cache/warm", { passages: passages.map(({ text, title, id }) => ({ text, title, id })) });
        button.textContent = "Caching these passages… ask again in a few seconds";
      } catch (error) {
        button.textContent = error.message;
      }
    });
    return el("p", { class: "hint" }, `${several(report.chunks_missing, "passage")} not cached. `, button);
  }

  return { begin, show, end, turns: () => [...history, { question: asked.question, text }] };
}

/** The answer with a mark behind each sentence for each passage that it rests on; code has none. */
function cited({ text, citations }) {
  const letters = [...text]; // positions count characters, not UTF-16 units
  const shown = text.includes("```") ? [] : citations;
  const cuts = [0, ...shown.map(({ end }) => end), letters.length];
  const pieces = cuts.slice(1).map((end, n) => letters.slice(cuts[n], end).join("") + (n < shown.length ? mark(shown[n].passage + 1) : ""));
  const nodes = markdown(pieces.join(""));
  const marks = nodes.flatMap((node) => [...node.querySelectorAll(".cite")]);
  if (marks.length === shown.length) marks.forEach((each, n) => (each.title = shown[n].quote));
  return nodes;
}

function question(text) {
  return el("p", { class: "asked" }, text);
}

/** Whether the KV is full prefill's, and what was recomputed if not. */
function exactness(report) {
  if (report.exact) return `Exact: no token has approximate KV${report.reason ? `, as ${report.reason}` : ""}.`;
  if (report.blended) return `${several(report.tokens_recomputed, "token")} recomputed, ${percent(report.share_recomputed)} of the cached ones.`;
  if (report.tokens_kept) return `${several(report.tokens_kept, "token")} kept from the last turn, which was blended.`;
  return "Approximate: cached KV is stored by a lossy codec.";
}
