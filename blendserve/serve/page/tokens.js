// A prompt as tokens, in runs of one state. The pointer or the arrow keys show what is known of a token.

import { el } from "./dom.js";
import { count, percent } from "./format.js";
import { countStates, STATES, statesOf } from "./states.js";

const STEPS = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1 };

/** The passages as text, until the prefill is done. */
export function plainView(passages) {
  return el(
    "div",
    { class: "parts" },
    ...passages.map((passage, n) =>
      el("article", { class: "part", id: `passage-${n + 1}` }, partHead(`${n + 1}`, passage), el("p", { class: "tokens" }, passage.text)),
    ),
  );
}

/** All parts of a prompt with the states of their tokens. */
export function tokenView(explanation, passages, report) {
  const view = new TokenView(explanation, passages, report);
  return view.element;
}

class TokenView {
  constructor(explanation, passages, report) {
    this.explanation = explanation;
    this.passages = passages;
    this.report = report;
    this.states = statesOf(explanation.states);
    this.tip = el("div", { id: "token-tip", class: "tip", role: "tooltip", hidden: true });
    this.parts = el(
      "div",
      { class: "parts", role: "group", "aria-label": "Tokens of the prompt. Move between them with the arrow keys." },
      ...explanation.parts.map((part) => this.part(part)),
    );
    this.element = el("div", { class: "prompt" }, this.legend(), this.parts, this.tip);
    this.tokens = this.parts.querySelectorAll("[data-i]");
    if (this.tokens.length) this.tokens[0].tabIndex = 0;
    this.listen();
  }

  /** The number of tokens of each state; a pressed button dims the other states. */
  legend() {
    const sums = countStates(this.states);
    const total = this.states.length;
    const bar = el(
      "div",
      { class: "bar", "aria-hidden": "true" },
      ...[...sums].map(([state, n]) => el("span", { class: `fill s-${state}`, style: { width: `${(100 * n) / total}%` } })),
    );
    const buttons = [...sums].map(([state, n]) => {
      const [name, note, about] = STATES[state];
      return el(
        "button",
        { type: "button", class: "key", "aria-pressed": "false", title: about, "data-state": state },
        el("span", { class: `sample s-${state}`, "aria-hidden": "true" }, "Aa"),
        el("span", {}, name),
        el("b", {}, percent(n / total)),
        note && el("span", {}, `(${note})`),
        el("span", { class: "muted" }, count(n)),
      );
    });
    for (const button of buttons) button.addEventListener("click", () => this.single(button, buttons));
    return el("div", { class: "legend" }, bar, el("div", { class: "keys", role: "group", "aria-label": "States" }, ...buttons));
  }

  single(button, buttons) {
    const on = button.getAttribute("aria-pressed") === "true";
    for (const other of buttons) other.setAttribute("aria-pressed", String(other === button && !on));
    if (on) delete this.parts.dataset.single;
    else this.parts.dataset.single = button.dataset.state;
  }

  part(part) {
    const passage = (part.kind === "passage" && this.passages[part.passage]) || { title: part.kind };
    const name = part.kind === "passage" ? `${part.passage + 1}` : "";
    return el(
      "article",
      { class: "part", id: name ? `passage-${name}` : null },
      partHead(name, passage, part.tier, part.stop - part.start),
      el("p", { class: "reason" }, part.reason),
      el("p", { class: "tokens" }, ...this.runs(part)),
    );
  }

  runs(part) {
    const runs = [];
    for (let i = part.start; i < part.stop; ) {
      const state = this.states[i];
      const run = el("span", { class: `run s-${state}` });
      for (; i < part.stop && this.states[i] === state; i++) run.append(this.token(i));
      runs.push(run);
    }
    return runs;
  }

  token(i) {
    const token = document.createElement("span");
    token.dataset.i = i;
    token.textContent = this.shown(i);
    return token;
  }

  /** Line ends as visible characters; several in a row end one line. */
  shown(i) {
    const marked = this.explanation.tokens[i].replace(/\n+/g, (ends) => `${"↵".repeat(ends.length)}\n`);
    const on = marked.endsWith("\n") && this.explanation.tokens[i + 1]?.startsWith("\n");
    return on ? marked.slice(0, -1) : marked;
  }

  listen() {
    this.parts.addEventListener("pointerover", (event) => this.point(event.target.closest("[data-i]")));
    this.parts.addEventListener("pointerleave", () => this.hide());
    this.parts.addEventListener("click", (event) => this.focus(event.target.closest("[data-i]")));
    this.parts.addEventListener("focusin", (event) => this.rest(event.target.closest("[data-i]")));
    this.parts.addEventListener("focusout", () => this.hide());
    this.parts.addEventListener("scroll", () => this.hide());
    this.parts.addEventListener("keydown", (event) => this.walk(event));
  }

  /** The Tab key stops at one token: the one that had the focus last. */
  rest(token) {
    if (!token) return;
    this.parts.querySelector('[tabindex="0"]')?.setAttribute("tabindex", "-1");
    token.tabIndex = 0;
    this.point(token);
  }

  walk(event) {
    if (event.key === "Escape") return this.hide();
    const token = event.target.closest("[data-i]");
    const last = this.tokens.length - 1;
    const i = token ? Number(token.dataset.i) : 0;
    const to = { Home: 0, End: last }[event.key] ?? (event.key in STEPS ? this.next(i, event) : null);
    if (to === null) return;
    event.preventDefault();
    this.focus(this.tokens[to]);
  }

  focus(token) {
    if (!token) return;
    token.tabIndex = -1;
    token.focus();
  }

  /** The next token; for up and down, the first token of the next run. */
  next(i, { key }) {
    const step = STEPS[key];
    let to = i + step;
    if (key === "ArrowDown" || key === "ArrowUp") {
      while (this.states[to] !== undefined && this.states[to] === this.states[i]) to += step;
      while (step < 0 && to > 0 && this.states[to - 1] === this.states[to]) to -= 1;
    }
    return Math.max(0, Math.min(this.tokens.length - 1, to));
  }

  point(token) {
    if (!token) return this.hide();
    if (this.pointed === token) return;
    this.pointed?.removeAttribute("aria-describedby");
    this.pointed = token;
    token.setAttribute("aria-describedby", "token-tip");
    this.tip.replaceChildren(...this.about(Number(token.dataset.i)));
    this.tip.hidden = false;
    const at = token.getBoundingClientRect();
    const box = this.tip.getBoundingClientRect();
    const left = Math.max(8, Math.min(at.left, innerWidth - box.width - 8));
    const below = at.bottom + 8 + box.height < innerHeight;
    this.tip.style.left = `${left}px`;
    this.tip.style.top = `${below ? at.bottom + 8 : at.top - box.height - 8}px`;
  }

  hide() {
    this.pointed?.removeAttribute("aria-describedby");
    this.pointed = null;
    this.tip.hidden = true;
  }

  about(i) {
    const state = this.states[i];
    const [name, , about] = STATES[state];
    const part = this.explanation.parts.find((each) => each.start <= i && i < each.stop);
    const score = this.explanation.scores?.[i] ?? null;
    const lines = [
      ["score", score === null ? null : `${score} by policy ${this.report.policy}, ${this.rank(score)}`],
      ["tier", part.tier],
      ["donor", part.donors.find((each) => each.start <= i && i < each.stop)?.key],
      ["why", part.reason],
    ];
    return [
      el(
        "p",
        { class: "tip-head" },
        el("code", {}, JSON.stringify(this.explanation.tokens[i])),
        el("span", { class: "muted" }, `token ${count(i + 1)} of ${count(this.states.length)}`),
      ),
      el("p", {}, el("b", { class: `sample s-${state}` }, name), ` ${about}`),
      el("dl", {}, ...lines.filter(([, text]) => text).flatMap(([name, text]) => [el("dt", {}, name), el("dd", {}, text)])),
    ];
  }

  rank(score) {
    this.sorted ??= this.explanation.scores.filter((each) => each !== null).sort((a, b) => b - a);
    const above = this.sorted.findIndex((each) => each <= score);
    return `rank ${count(above + 1)} of ${count(this.sorted.length)}`;
  }
}

function partHead(name, passage, tier = null, tokens = null) {
  return el(
    "header",
    {},
    name && el("span", { class: "number" }, name),
    el("h3", {}, passage.title || passage.id || "untitled"),
    passage.score != null && el("span", { class: "badge", title: "similarity to the question" }, passage.score.toFixed(2)),
    tier && el("span", { class: "badge", title: "tier that its KV was read from" }, tier),
    tokens !== null && el("span", { class: "muted" }, `${count(tokens)} tokens`),
  );
}
