/** A block of code: its language, a button that copies it, and its lines in colours. */

import { copyButton } from "./copy.js";
import { el } from "./dom.js";
import { split } from "./highlight.js";

const LONGEST_NAME = 20; // letters of the language that are shown

export class CodeBlock {
  #text = "";
  #done = 0; // number of lines that are complete, and drawn for good
  #open = null; // what the last of them has begun and not ended
  #last = el("span");

  /** `language`: as the model named it; may be empty. The property `element` is the block's element. */
  constructor(language) {
    this.language = language;
    this.code = el("code", {}, this.#last);
    const name = language.slice(0, LONGEST_NAME) || "code";
    const copy = copyButton(() => this.#text.replace(/\n$/, ""), `the ${name}`);
    this.element = el(
      "figure",
      { class: "code", "aria-label": `Code in ${name}` },
      el("figcaption", {}, el("span", {}, name), copy),
      el("pre", { tabindex: 0, role: "region", "aria-label": "Code" }, this.code),
    );
  }

  /** Show a text that begins with the complete lines of the text before. Only what is new is drawn. */
  update(text) {
    this.#text = text;
    const lines = text.split("\n");
    const last = lines.pop();
    for (const line of lines.slice(this.#done)) this.#last.before(...this.#nodes(line, true), "\n");
    this.#done = lines.length;
    this.#last.replaceChildren(...this.#nodes(last, false));
  }

  #nodes(line, complete) {
    const { parts, open } = split(line, this.language, this.#open);
    if (complete) this.#open = open;
    return parts.map(({ kind, text }) => (kind ? el("span", { class: `code-${kind}` }, text) : text));
  }
}
