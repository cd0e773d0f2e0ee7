/** An answer on the page: tokens in the colours of their drafters, statistics, and a comparison with plain decoding. */

import { TARGET } from "./palette.js";
import { count, duration, el, rounded, visible } from "./dom.js";
import { attach, description } from "./tip.js";

/** What a user can do about an error, by the error's code. */
const ADVICE = {
  connection_lost: "Is the server still running? This page reconnects by itself; then send the message again.",
  context_length_exceeded: "Clear the conversation, or ask for fewer tokens.",
  engine_stopped: "The engine is being restarted: see above. Try again when it is ready.",
  internal_error: "The server's log has the reason, under the id of this request.",
  invalid_api_key: "Enter a valid key above, then try again.",
  queue_full: "The server is busy with other requests. Try again in a moment.",
  rate_limit_exceeded: "This key has used up its limit for this minute. Try again later.",
  shutting_down: "The server is shutting down. Try again when it is back.",
  timeout: "The answer took longer than the server allows. Ask for fewer tokens.",
};

const KEYS = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity };

const FENCE = /^\s*```/; // begins and ends a block of code in Markdown
const BLOCK = /^\s*(```|\|)/; // begins a line of code or of a table

export class AnswerView {
  #shown = 0; // number of spans
  #line = ""; // the text since the last line break
  #fenced = false; // whether it is in a block of code
  #byStep = new Map();
  #now = -1;
  #cursor = null;
  #rest = new Text();

  /**
   * `on`: callbacks. `compare()`, `retry()`; `step(number)` when the user chooses a token; `say(text)` for screen
   * readers; `point(element)` for the token under the cursor, or null.
   */
  constructor(answer, name, palette, on) {
    Object.assign(this, { answer, palette, on });
    this.said = el("div", {
      class: "said",
      tabindex: 0,
      role: "group",
      "aria-label": "Answer. The arrow keys move through its tokens.",
      onkeydown: (event) => this.#key(event),
      onclick: ({ target }) => target.closest(".token") && this.#choose(target.closest(".token")),
      onblur: () => this.#point(null),
    });
    this.thoughts = el("span", { class: "thoughts", role: "group", "aria-label": "Thoughts", hidden: true });
    this.said.append(this.thoughts, this.#rest);
    this.legend = el("ul", { class: "legend", "aria-label": "Number of tokens by drafter" });
    this.numbers = el("p", { class: "numbers" });
    this.compare = el(
      "button",
      { type: "button", class: "quiet", hidden: true, onclick: () => on.compare() },
      "Compare with plain decoding",
    );
    this.comparison = el("div", { class: "comparison", hidden: true });
    this.footer = el("footer", { hidden: true }, this.legend, this.numbers, this.compare, this.comparison);
    this.element = el(
      "article",
      { class: "turn answer", "aria-label": `${name} answers` },
      el("h3", {}, name),
      this.said,
      this.footer,
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
    this.said.classList.toggle("running", answer.running);
    this.footer.hidden = !answer.numTokens;
    this.legend.replaceChildren(...[...answer.authors].map(([drafter, number]) => this.#entry(drafter, number)));
    this.#number();
  }

  /** Show that the answer has ended. */
  end() {
    const { answer } = this;
    this.update();
    if (answer.error) this.#problem(answer.error);
    this.compare.hidden = !answer.body.speculation || !["stop", "length"].includes(answer.finish);
    if (!answer.error) this.on.say(`Answer: ${answer.text}`);
  }

  /** Mark the tokens of a step, and unmark all others; -1: no step. */
  mark(step) {
    if (step === this.#now) return;
    for (const token of this.#byStep.get(this.#now) ?? []) token.classList.remove("now");
    for (const token of this.#byStep.get(step) ?? []) token.classList.add("now");
    this.#now = step;
  }

  /** Show the comparison with the same answer, decoded plainly. The plain answer may still be running. */
  compared(plain) {
    const { answer, comparison } = this;
    const fastest = Math.max(answer.rate ?? 0, plain.rate ?? 0);
    const bar = (name, rate) => {
      const fill = el("span", { class: "bar" });
      fill.style.inlineSize = `${fastest ? (100 * (rate ?? 0)) / fastest : 0}%`;
      const track = el("span", { class: "track" }, fill);
      const value = rate === null ? "too short to time" : `${rounded(rate)} tokens/s`;
      return el("div", { class: "rate" }, el("span", {}, name), track, el("span", {}, value));
    };
    comparison.hidden = false;
    this.compare.hidden = true;
    comparison.replaceChildren(bar("speculative", answer.rate), bar("plain", plain.rate), this.#verdict(plain));
  }

  #verdict(plain) {
    const { answer } = this;
    if (plain.running) return el("p", {}, "Generating it again without speculation …");
    if (plain.error) return el("p", { class: "bad", role: "alert" }, `Not compared: ${plain.error.message}.`);
    if (plain.finish === "stopped") return el("p", {}, "The comparison was stopped.");
    if (plain.text !== answer.text) return difference(answer.text, plain.text);
    const ratio = answer.rate && plain.rate ? `${rounded(answer.rate / plain.rate)} times the speed, and ` : "";
    const text = `✓ ${ratio}exactly the same text (seed ${answer.body.seed})`;
    const verdict = el("p", { class: "good" }, text);
    this.on.say(verdict.textContent);
    return verdict;
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

  #entry(drafter, number) {
    const sample = this.palette.paint(el("span", { class: "sample" }, drafter ?? TARGET), drafter);
    return el("li", {}, sample, " ", el("b", {}, String(number)));
  }

  #number() {
    const { answer } = this;
    const facts = [count(answer.numTokens, "token")];
    if (answer.rate) facts.push(`${rounded(answer.rate)} tokens/s`);
    if (answer.meanAccepted) facts.push(`${rounded(answer.meanAccepted)} tokens a step`);
    if (answer.firstAfter !== null) facts.push(`first after ${duration(answer.firstAfter)}`);
    facts.push(`seed ${answer.body.seed}`);
    if (answer.finish === "stopped") facts.push("stopped");
    if (answer.finish === "length") facts.push("cut at max tokens");
    this.numbers.replaceChildren(...facts.map((fact) => el("span", {}, fact)));
  }

  #problem({ message, code, retryAfter }) {
    const advice = retryAfter ? `Try again in ${count(retryAfter, "second")}.` : (ADVICE[code] ?? "");
    const text = `${message[0].toUpperCase()}${message.slice(1)}. `.replace(/\.\. $/, ". ");
    const retry = el("button", { type: "button", onclick: () => this.on.retry() }, "Try again");
    this.said.after(el("div", { class: "problem", role: "alert" }, el("p", {}, el("strong", {}, text), advice), retry));
    this.said.hidden = !this.answer.text && !this.answer.thoughts;
  }

  #key(event) {
    const move = KEYS[event.key];
    const tokens = [...this.said.querySelectorAll(".token")];
    if (move === undefined || !tokens.length) return;
    event.preventDefault();
    const at = this.#cursor ? tokens.indexOf(this.#cursor) + move : move > 0 && move < Infinity ? 0 : move;
    this.#choose(tokens[Math.min(Math.max(at, 0), tokens.length - 1)]);
  }

  #choose(token) {
    this.#point(token);
    this.on.step(Number(token.dataset.step));
    this.on.say(description(token));
  }

  #point(token) {
    this.#cursor?.classList.remove("cursor");
    this.#cursor = token;
    token?.classList.add("cursor");
    token?.scrollIntoView({ block: "nearest" });
    this.on.point(token);
  }
}

/** Show where two texts differ. That must never happen, so the user is asked to report it. */
function difference(ours, plain) {
  let at = 0;
  while (at < ours.length && ours[at] === plain[at]) at += 1;
  const around = (text) => {
    const rest = el("mark", {}, text.slice(at, at + 20) || "∅");
    return el("q", {}, `…${text.slice(Math.max(at - 20, 0), at)}`, rest);
  };
  return el(
    "p",
    { class: "bad", role: "alert" },
    `✗ The texts differ from character ${at + 1}. This is a bug of soothsay; please report it. Speculative: `,
    around(ours),
    " plain: ",
    around(plain),
  );
}
