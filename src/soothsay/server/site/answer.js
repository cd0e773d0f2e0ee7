/** An answer as it comes: its text, whose each token is, and the tree of each step. */

const TIMED = 16; // tokens that are enough to speak of a speed
const PART = "\ufffd"; // what a token says that is only part of a character

/**
 * Finds each token's share of the text.
 *
 * Text comes later than its tokens where it might still change (half a character, the beginning of a stop string), and
 * a token's own text need not be in it (special tokens, a space at the beginning).
 */
export class Aligner {
  #text = "";
  #tokens = [];
  #begun = false;

  /** Spans that have become certain: `{text, tokens}`, one token each but where several make up a character. */
  push(text, tokens) {
    this.#text += text;
    this.#tokens.push(...tokens);
    const spans = [];
    for (let span = this.#next(); span; span = this.#next()) {
      if (span.text) spans.push(span);
    }
    return spans;
  }

  /** Text that is not yet known to be any token's; all of it where no steps are told. */
  get rest() {
    return this.#text;
  }

  /** What is left at the end. */
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
    if (own.startsWith(this.#text)) return null; // the rest of it is to come
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

/** Tokens that a step brought, in order: `{text, drafter, step}`. */
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
  finish = null; // the server's reason, "stopped" by the user, or "error"
  ending = null; // the server's reason, of a stream that has yet to close
  error = null;
  firstAt = null;
  lastAt = null;
  #aligner = new Aligner();
  #firstTokens = 0;

  /** `body`: what was asked, with the seed that makes it the same again. */
  constructor(body, now) {
    this.body = body;
    this.askedAt = now;
  }

  /** Text behind the last span. */
  get rest() {
    return this.#aligner.rest;
  }

  get running() {
    return this.finish === null;
  }

  /** Take in a chunk of the stream that came at `now`, in milliseconds. */
  push(chunk, now) {
    if (chunk.usage) this.usage = chunk.usage;
    const [choice] = chunk.choices;
    if (!choice) return;
    const content = choice.delta.content ?? "";
    const steps = choice.speculation?.steps ?? [];
    const tokens = steps.flatMap((step, index) => emitted(step, this.steps.length + index));
    if (content || tokens.length) {
      if (this.firstAt === null) {
        this.firstAt = now;
        this.#firstTokens = tokens.length || 1;
      }
      this.lastAt = now;
    }
    this.text += content;
    this.steps.push(...steps);
    this.tokens.push(...tokens);
    this.spans.push(...this.#aligner.push(content, tokens));
    if (choice.finish_reason) this.ending = choice.finish_reason;
  }

  /** Nothing more will come. */
  end(finish = this.ending) {
    this.finish = finish ?? "stopped";
    this.spans.push(...this.#aligner.end());
    if (this.usage) this.tokens.length = Math.min(this.tokens.length, this.usage.completion_tokens);
  }

  get numTokens() {
    return this.usage?.completion_tokens ?? this.tokens.length;
  }

  /** Tokens a second behind the first chunk, so that reading the prompt does not count; null if they are too few. */
  get rate() {
    const tokens = this.numTokens - this.#firstTokens;
    const seconds = (this.lastAt - this.firstAt) / 1000;
    return tokens >= TIMED && seconds > 0 ? tokens / seconds : null;
  }

  /** Seconds to the first token; null before. */
  get firstAfter() {
    return this.firstAt === null ? null : (this.firstAt - this.askedAt) / 1000;
  }

  /** Tokens a step, the target's own counted. */
  get meanAccepted() {
    if (this.usage?.speculation) return this.usage.speculation.mean_accepted;
    return this.steps.length ? this.tokens.length / this.steps.length : null;
  }

  /** How many tokens are whose: drafters by name, the target's under null. Most first, the target last. */
  get authors() {
    const counts = new Map();
    for (const { drafter } of this.tokens) counts.set(drafter, (counts.get(drafter) ?? 0) + 1);
    return new Map([...counts].sort(([a, m], [b, n]) => (a === null) - (b === null) || n - m));
  }
}
