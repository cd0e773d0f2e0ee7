/** An answer on the page: its text or its draft view, statistics, and a comparison with plain decoding. */

import { copyButton } from "./copy.js";
import { count, duration, el, rounded, say } from "./dom.js";
import { DraftView } from "./draft.js";
import { Markdown } from "./markdown.js";
import { TARGET } from "./palette.js";
import { recall, remember } from "./store.js";

/** What a user can do about an error, by the error's code. */
const ADVICE = {
  connection_lost: "Is the server still running? This page reconnects by itself; then send the message again.",
  context_length_exceeded: "Begin a new conversation, or ask for fewer tokens.",
  engine_stopped: "The engine is being restarted: see above. Try again when it is ready.",
  internal_error: "The server's log has the reason, under the id of this request.",
  invalid_api_key: "Enter a valid key above, then try again.",
  queue_full: "The server is busy with other requests. Try again in a moment.",
  rate_limit_exceeded: "This key has used up its limit for this minute. Try again later.",
  shutting_down: "The server is shutting down. Try again when it is back.",
  timeout: "The answer took longer than the server allows. Ask for fewer tokens.",
};

export class AnswerView {
  /**
   * `name`: of the model. `on`: callbacks. `compare()`; `retry()` for another answer; and those of a `DraftView`.
   */
  constructor(answer, name, palette, on) {
    Object.assign(this, { answer, name, palette, on });
    this.draft = new DraftView(answer, palette, on);
    this.prose = new ProseView(answer);
    this.said = el("div", { class: "said" });
    this.legend = el("ul", { class: "legend", "aria-label": "Number of tokens by drafter" });
    this.numbers = el("p", { class: "numbers" });
    const button = (label, onclick) => el("button", { type: "button", class: "quiet", hidden: true, onclick }, label);
    this.drafts = button("Draft view", () => {
      const isDraft = this.view === this.prose;
      remember("draft view", isDraft);
      this.#show(isDraft);
    });
    this.again = button("Regenerate", () => on.retry());
    this.again.classList.add("again");
    this.compare = button("Compare with plain decoding", () => on.compare());
    this.copy = copyButton(() => answer.text, "the answer");
    this.copy.hidden = true;
    this.actions = el("div", { class: "actions" }, this.copy, this.again, this.compare);
    this.comparison = el("div", { class: "comparison", hidden: true });
    this.footer = el("footer", { hidden: true }, this.legend, this.numbers, this.actions, this.comparison);
    this.element = el(
      "article",
      { class: "turn answer", "aria-label": `${name} answers` },
      el("div", { class: "head" }, el("h3", {}, name), this.drafts),
      this.said,
      this.footer,
    );
    this.#show(!answer.facts && recall("draft view") === true);
  }

  /** Draw what is new. */
  update() {
    const { answer } = this;
    this.view.update();
    this.said.classList.toggle("running", answer.running);
    this.drafts.hidden = Boolean(answer.facts) || !(answer.text || answer.thoughts);
    this.footer.hidden = !answer.numTokens && answer.running;
    this.legend.replaceChildren(...[...answer.authors].map(([drafter, number]) => this.#entry(drafter, number)));
    this.numbers.replaceChildren(...this.facts.map((fact) => el("span", {}, fact)));
  }

  /** Show that the answer has ended. */
  end() {
    const { answer } = this;
    this.update();
    this.copy.hidden = !answer.text;
    this.again.hidden = Boolean(answer.error); // the error has a button of its own
    this.compare.hidden = !answer.body.speculation || !["stop", "length"].includes(answer.finish);
    if (answer.error) this.#problem(answer.error);
    else if (!answer.facts) say(`Answer: ${answer.text}`);
  }

  /** Mark the tokens of a step, and unmark all others; -1: no step. */
  mark(step) {
    this.draft.mark(step);
  }

  /** Facts about the answer, as texts. */
  get facts() {
    const { answer } = this;
    if (answer.facts) return answer.facts;
    const facts = answer.numTokens ? [count(answer.numTokens, "token")] : [];
    if (answer.rate) facts.push(`${rounded(answer.rate)} tokens/s`);
    if (answer.meanAccepted) facts.push(`${rounded(answer.meanAccepted)} tokens a step`);
    if (answer.firstAfter !== null) facts.push(`first after ${duration(answer.firstAfter)}`);
    facts.push(`seed ${answer.body.seed}`);
    if (answer.finish === "stopped") facts.push("stopped");
    if (answer.finish === "length") facts.push("cut at max tokens");
    return facts;
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
    say(text);
    return verdict;
  }

  #show(isDraft) {
    this.view = isDraft ? this.draft : this.prose;
    this.view.update();
    this.drafts.setAttribute("aria-pressed", isDraft);
    this.said.replaceChildren(this.view.element);
  }

  #entry(drafter, number) {
    const sample = this.palette.paint(el("span", { class: "sample" }, drafter ?? TARGET), drafter);
    return el("li", {}, sample, " ", el("b", {}, String(number)));
  }

  #problem({ message, code, retryAfter }) {
    const advice = retryAfter ? `Try again in ${count(retryAfter, "second")}.` : (ADVICE[code] ?? "");
    const text = `${message[0].toUpperCase()}${message.slice(1)}. `.replace(/\.\. $/, ". ");
    const retry = el("button", { type: "button", onclick: () => this.on.retry() }, "Try again");
    this.said.after(el("div", { class: "problem", role: "alert" }, el("p", {}, el("strong", {}, text), advice), retry));
    this.said.hidden = !this.answer.text && !this.answer.thoughts;
  }
}

/** An answer as it is meant to be read. */
class ProseView {
  constructor(answer) {
    this.answer = answer;
    this.thoughts = el("p", { class: "thoughts", role: "group", "aria-label": "Thoughts", hidden: true });
    this.markdown = new Markdown();
    this.element = el("div", {}, this.thoughts, this.markdown.element);
  }

  /** Draw what is new. */
  update() {
    const { thoughts, text, running } = this.answer;
    this.thoughts.hidden = !thoughts;
    this.thoughts.textContent = thoughts;
    this.markdown.update(text, !running);
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
