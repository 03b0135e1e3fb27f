// What the Ask view shows before the first question: what this server does, and questions to click.

import { get } from "./api.js";
import { el } from "./dom.js";
import { STATES } from "./states.js";

const DOCUMENTS = 60; // whose titles are looked at
const MAX_TITLE = 60; // characters
const EXPLAINED = ["exact", "reused", "recomputed", "computed"];
const QUESTIONS = [
  (title) => `What should I know about ${title}?`,
  (title) => `Explain ${title} in two sentences.`,
  (title) => `Summarize what is said about ${title}.`,
];

/** `race(question)` is called for a question that is clicked. `explained`: gets what the colours mean. */
export function makeLanding(root, explained, race) {
  const choices = el("div", { class: "choices" });
  explained.replaceChildren(
    ...EXPLAINED.map((state) => {
      const [name, , meaning] = STATES[state];
      return el("div", {}, el("dt", {}, el("i", { class: `swatch s-${state}` }), name), el("dd", {}, meaning));
    }),
  );
  root.replaceChildren(
    el(
      "h2",
      {},
      "Your passages are read once. Next time, only the ",
      el("span", { class: "s-recomputed" }, "orange"),
      " tokens are computed.",
    ),
    choices,
  );

  /** Questions about documents of the first collection. */
  async function fill(collections) {
    if (!collections.length) return choices.replaceChildren(el("p", { class: "muted" }, "This server has no collections: ask with “Plain prompt”."));
    const { data } = await get("v1/documents", { collection: collections[0].name, limit: DOCUMENTS });
    const titles = data.map(({ title }) => title.trim()).filter((title) => title && title.length <= MAX_TITLE);
    const each = titles.length / QUESTIONS.length;
    const questions = QUESTIONS.map((about, n) => [about, titles[Math.floor(n * each)]]).slice(0, titles.length);
    choices.replaceChildren(
      ...questions.map(([about, title]) => choice(about(withinSentence(title)))),
      data.length
        ? el("p", { class: "muted" }, "A click answers the question by full prefill and blended, side by side.")
        : el("p", { class: "muted" }, "There are no documents yet. ", el("a", { href: "#documents" }, "Add some"), ", then ask."),
    );
  }

  function choice(question) {
    return el("button", { type: "button", onclick: () => race(question) }, el("span", {}, question), el("span", { class: "go", "aria-hidden": "true" }, "→"));
  }

  return { fill };
}

/** A title as part of a sentence: "The with statement" begins with a small letter there. */
function withinSentence(title) {
  return title.replace(/^(The|A|An)\b/, (article) => article.toLowerCase());
}
