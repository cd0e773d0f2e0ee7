/** The conversation: its turns, and the next message. Only one answer runs at a time. */

import { Answer } from "./answer.js";
import { el, onPaint } from "./dom.js";
import { AnswerView } from "./view.js";

const NEAR = 60; // pixels from the end of the list within which it scrolls along with new text

export class Conversation {
  #turns = []; // {text, answer, view, element}
  #controller = null;

  /**
   * `parts`: the elements `list`, `welcome` and `system`. `read()` returns the settings. `on`: the callbacks
   * `busy(whether)` and `failed(error)`, and `say` and `point` of an `AnswerView`.
   */
  constructor(parts, { api, palette, tree, read }, on) {
    Object.assign(this, { parts, api, palette, tree, read, on });
    this.model = "";
  }

  /** Whether an answer is running. */
  get busy() {
    return this.#controller !== null;
  }

  /** Send a message, and show the answer while it streams. */
  async send(text) {
    const { list, welcome } = this.parts;
    const turn = { text };
    const messages = [...this.#messages(), { role: "user", content: text }];
    const body = { model: this.model, messages, ...this.read() };
    const answer = (turn.answer = new Answer(body, performance.now()));
    const view = (turn.view = new AnswerView(answer, this.model || "model", this.palette, {
      ...this.on,
      step: (step) => this.tree.show(answer, step),
      compare: () => this.#compare(turn),
      retry: () => this.#retry(turn),
    }));
    const question = el("article", { class: "turn question", "aria-label": "You" }, el("p", {}, text));
    turn.element = el("div", {}, question, view.element);
    welcome.hidden = true;
    list.append(turn.element);
    list.scrollTop = list.scrollHeight;
    this.#turns.push(turn);
    this.tree.show(answer);
    await this.#follow(answer, () => {
      view.update();
      this.tree.update(answer);
    });
    view.end();
    this.tree.update(answer);
    this.#keepEnd();
  }

  /** Stop the running answer. Its text so far stays. */
  stop() {
    this.#controller?.abort();
  }

  /** Remove all turns. */
  clear() {
    this.stop();
    for (const { element } of this.#turns.splice(0)) element.remove();
    this.parts.welcome.hidden = false;
    this.tree.show(null);
  }

  /** Mark the tokens of one step of one answer, and unmark all others. */
  mark(answer, step) {
    for (const turn of this.#turns) turn.view.mark(turn.answer === answer ? step : -1);
  }

  #messages() {
    const system = this.parts.system.value.trim();
    return [
      ...(system ? [{ role: "system", content: system }] : []),
      ...this.#turns
        .filter(({ answer }) => answer.text)
        .flatMap(({ text, answer }) => [
          { role: "user", content: text },
          { role: "assistant", content: answer.text },
        ]),
    ];
  }

  async #retry(turn) {
    if (this.busy) return;
    this.#turns.splice(this.#turns.indexOf(turn), 1);
    turn.element.remove();
    await this.send(turn.text);
  }

  async #compare({ answer, view }) {
    if (this.busy) return;
    const plain = new Answer({ ...answer.body, speculation: false }, performance.now());
    view.compared(plain);
    await this.#follow(plain, () => view.compared(plain));
    view.compared(plain);
    this.#keepEnd();
  }

  /** Request an answer and read it to its end. Calls `draw` now and then. */
  async #follow(answer, draw) {
    const controller = (this.#controller = new AbortController());
    this.on.busy(true);
    const drawSoon = onPaint(() => {
      if (!answer.running) return;
      const follows = this.#atEnd;
      draw();
      if (follows) this.#keepEnd();
    });
    try {
      for await (const chunk of this.api.chat(answer.body, controller.signal)) {
        answer.push(chunk, performance.now());
        drawSoon();
      }
      answer.end();
    } catch (error) {
      answer.error = error;
      answer.end("error");
      this.on.failed(error);
    }
    this.#controller = null;
    this.on.busy(false);
  }

  get #atEnd() {
    const { list } = this.parts;
    return list.scrollHeight - list.scrollTop - list.clientHeight < NEAR;
  }

  #keepEnd() {
    this.parts.list.scrollTop = this.parts.list.scrollHeight;
  }
}
