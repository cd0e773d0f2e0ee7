/** The draft view of an answer: its tokens in the colours of their drafters. */

import { el, say, visible } from "./dom.js";
import { attach, description } from "./tip.js";

const KEYS = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };

const FENCE = /^\s*```/; // begins and ends a block of code in Markdown
const BLOCK = /^\s*(```|\|)/; // begins a line of code or of a table

export class DraftView {
  #shown = 0; // number of spans
  #line = ""; // the text since the last line break
  #fenced = false; // whether it is in a block of code
  #byStep = new Map();
  #now = -1;
  #cursor = null;
  #rest = new Text();

  /** `on`: callbacks. `step(number)` when the user chooses a token; `point(element)` for the token under the cursor, or null. */
  constructor(answer, palette, on) {
    Object.assign(this, { answer, palette, on });
    this.thoughts = el("span", { class: "thoughts", role: "group", "aria-label": "Thoughts", hidden: true });
    this.element = el(
      "div",
      {
        class: "tokens",
        tabindex: 0,
        role: "group",
        "aria-label": "Answer. The arrow keys move through its tokens.",
        onkeydown: (event) => this.#key(event),
        onclick: ({ target }) => target.closest(".token") && this.#choose(target.closest(".token")),
        onblur: () => this.#point(null),
      },
      this.thoughts,
      this.#rest,
    );
  }

  /** Draw what is new. */
  update() {
    const { answer } = this;
    for (const span of answer.spans.slice(this.#shown)) {
      if (span.isThought) this.thoughts.append(...this.#nodes(span));
      else if (this.#inBlock(span.text)) this.#rest.before(el("code", {}, ...this.#nodes(span)));
      else this.#rest.before(...this.#nodes(span));
    }
    this.thoughts.hidden = !answer.thoughts;
    this.#shown = answer.spans.length;
    this.#rest.data = answer.rest;
  }

  /** Mark the tokens of a step, and unmark all others; -1: no step. */
  mark(step) {
    if (step === this.#now) return;
    for (const token of this.#byStep.get(this.#now) ?? []) token.classList.remove("now");
    for (const token of this.#byStep.get(step) ?? []) token.classList.add("now");
    this.#now = step;
  }

  #nodes({ text, tokens }) {
    const [first] = tokens;
    if (!first) return [text];
    const { drafter, step } = first;
    const token = visible(text);
    const blank = !text.trim();
    const space = blank ? 0 : text.length - text.trimStart().length;
    const element = el("span", { class: blank ? "token blank" : "token" }, text.slice(space));
    attach(element, { token, drafter, step, kind: drafter === null ? "bonus" : "accepted" });
    if (!this.#byStep.has(step)) this.#byStep.set(step, []);
    this.#byStep.get(step).push(element);
    if (step === this.#now) element.classList.add("now");
    return [text.slice(0, space), this.palette.paint(element, drafter)]; // lines can break at a space outside a token
  }

  /** Whether a text stands in code or in a table, of which the columns are to be seen. */
  #inBlock(text) {
    const [first, ...lines] = text.split("\n");
    const inBlock = this.#fenced || BLOCK.test(this.#line + first) || BLOCK.test(lines.at(-1) ?? "");
    this.#line += first;
    for (const line of lines) {
      if (FENCE.test(this.#line)) this.#fenced = !this.#fenced;
      this.#line = line;
    }
    return inBlock;
  }

  #key(event) {
    const move = KEYS[event.key];
    const tokens = [...this.element.querySelectorAll(".token")];
    if (move === undefined || !tokens.length) return;
    event.preventDefault();
    const at = this.#cursor ? tokens.indexOf(this.#cursor) + move : move > 0 && move < Infinity ? 0 : move;
    this.#choose(tokens[Math.min(Math.max(at, 0), tokens.length - 1)]);
  }

  #choose(token) {
    this.#point(token);
    this.on.step(Number(token.dataset.step));
    say(description(token));
  }

  #point(token) {
    this.#cursor?.classList.remove("cursor");
    this.#cursor = token;
    token?.classList.add("cursor");
    token?.scrollIntoView({ block: "nearest" });
    this.on.point(token);
  }
}
