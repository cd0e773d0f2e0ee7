/** An answer while it streams: its text, the drafter of each token, and the draft tree of each step. */

const TIMED = 16; // tokens that are needed to measure a speed
const PART = "\ufffd"; // stands in the text of a token that is only a part of a character

/**
 * Finds the part of the text that belongs to each token.
 *
 * Text arrives later than its tokens if it may still change: half a character, or the beginning of a stop string. The
 * text of a token may also be missing: special tokens, or a space at the beginning.
 */
export class Aligner {
  #text = "";
  #tokens = [];
  #begun = false;

  /** The spans that are now known: `{text, tokens}`, with several tokens only if they make up one character. */
  push(text, tokens) {
    this.#text += text;
    this.#tokens.push(...tokens);
    const spans = [];
    for (let span = this.#next(); span; span = this.#next()) {
      if (span.text) spans.push(span);
    }
    return spans;
  }

  /** Text that has no token yet. That is all of the text if the server reports no steps. */
  get rest() {
    return this.#text;
  }

  /** The spans that are left when the answer has ended. */
  end() {
    const text = this.#text;
    this.#text = "";
    return text ? [{ text, tokens: this.#tokens.filter((token) => token.text.includes(PART)) }] : [];
  }

  #next() {
    if (!this.#tokens.length || !this.#text) return null;
    const parts = this.#tokens.findIndex((token) => !token.text.includes(PART));
    if (parts > 0) {
      const end = this.#text.indexOf(this.#tokens[parts].text, 1);
      return end < 0 ? null : this.#take(end, parts);
    }
    if (parts < 0) return null;
    const own = this.#tokens[0].text;
    if (this.#text.startsWith(own)) return this.#take(own.length, 1);
    if (own.startsWith(this.#text)) return null; // the rest of its text will come
    const bare = own.trimStart();
    if (!this.#begun && bare && this.#text.startsWith(bare)) return this.#take(bare.length, 1);
    return this.#take(0, 1);
  }

  #take(length, tokens) {
    const text = this.#text.slice(0, length);
    this.#text = this.#text.slice(length);
    this.#begun ||= length > 0;
    return { text, tokens: this.#tokens.splice(0, tokens) };
  }
}

/** The tokens that a step added to the answer, in order: `{text, drafter, step}`. */
function emitted(step, number) {
  const tokens = step.accepted.map((node) => ({
    text: step.tokens[node],
    drafter: step.drafters[node],
    step: number,
  }));
  return [...tokens, { text: step.bonus, drafter: null, step: number }];
}

export class Answer {
  text = "";
  spans = [];
  steps = [];
  tokens = [];
  usage = null;
  finish = null; // the server's finish reason, "stopped" if the user stopped it, or "error"; null: it still runs
  ending = null; // the server's finish reason, before the stream has closed
  error = null;
  firstAt = null;
  lastAt = null;
  #aligner = new Aligner();
  thoughts = ""; // of a reasoning model, before the text
  #firstTokens = 0;
  #placed = 0; // characters that are in spans
  facts = null; // what the page said about it when it was kept; null: it is of this visit

  /** `body`: the request. It has a seed, so that the same answer can be requested again. */
  constructor(body, now) {
    this.body = body;
    this.askedAt = now;
  }

  /** An answer that the browser has kept: its texts only. */
  static kept({ text, thoughts, facts }) {
    return Object.assign(new Answer({}, 0), { text, thoughts, facts, finish: "kept" });
  }

  /** The text after the last span. */
  get rest() {
    return this.#aligner.rest;
  }

  get running() {
    return this.finish === null;
  }

  /** Add a chunk of the stream. `now`: when it arrived, in milliseconds. */
  push(chunk, now) {
    if (chunk.usage) this.usage = chunk.usage;
    const [choice] = chunk.choices;
    if (!choice) return;
    const thoughts = choice.delta.reasoning_content ?? "";
    const content = choice.delta.content ?? "";
    const steps = choice.speculation?.steps ?? [];
    const tokens = steps.flatMap((step, index) => emitted(step, this.steps.length + index));
    if (thoughts || content || tokens.length) {
      if (this.firstAt === null) {
        this.firstAt = now;
        this.#firstTokens = tokens.length || 1;
      }
      this.lastAt = now;
    }
    this.thoughts += thoughts;
    this.text += content;
    this.steps.push(...steps);
    this.tokens.push(...tokens);
    this.#add(this.#aligner.push(thoughts + content, tokens));
    if (choice.finish_reason) this.ending = choice.finish_reason;
  }

  /** End the answer. */
  end(finish = this.ending) {
    this.finish = finish ?? "stopped";
    this.#add(this.#aligner.end());
    if (this.usage) this.tokens.length = Math.min(this.tokens.length, this.usage.completion_tokens);
  }

  /** Add spans, each with whether it belongs to the thoughts. */
  #add(spans) {
    for (const span of spans) {
      this.spans.push({ ...span, isThought: this.#placed < this.thoughts.length });
      this.#placed += span.text.length;
    }
  }

  get numTokens() {
    return this.usage?.completion_tokens ?? this.tokens.length;
  }

  /** Tokens a second after the first chunk, so that prefill does not count; null if there are too few tokens. */
  get rate() {
    const tokens = this.numTokens - this.#firstTokens;
    const seconds = (this.lastAt - this.firstAt) / 1000;
    return tokens >= TIMED && seconds > 0 ? tokens / seconds : null;
  }

  /** Seconds to the first token; null if there is none yet. */
  get firstAfter() {
    return this.firstAt === null ? null : (this.firstAt - this.askedAt) / 1000;
  }

  /** Tokens a step, including the target's own token. */
  get meanAccepted() {
    if (this.usage?.speculation) return this.usage.speculation.mean_accepted;
    return this.steps.length ? this.tokens.length / this.steps.length : null;
  }

  /** Number of tokens by drafter, the largest first. The target's own tokens come last, under the key null. */
  get authors() {
    const counts = new Map();
    for (const { drafter } of this.tokens) counts.set(drafter, (counts.get(drafter) ?? 0) + 1);
    return new Map([...counts].sort(([a, m], [b, n]) => (a === null) - (b === null) || n - m));
  }
}
