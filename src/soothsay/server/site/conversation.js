/** The conversation: its turns, and the next message. Only one answer runs at a time. */

import { Answer } from "./answer.js";
import { el, onPaint } from "./dom.js";
import { AnswerView } from "./view.js";

const NEAR = 60; // pixels from the end of the list within which it scrolls along with new text

const newId = () => crypto.getRandomValues(new Uint32Array(3)).join("-");

export class Conversation {
  #id = newId();
  #turns = []; // {text, answer, view, element}
  #visited = new Map(); // the turns of other conversations of this visit, with all that is on them, by id
  #controller = null;
  #running = null; // ends when the running answer does

  /**
   * `parts`: the elements `list`, `welcome` and `system`. `read()` returns the settings, or null if they are not valid.
   * `on`: the callbacks `busy(whether)`, `failed(error)` and `focus()`, and `point` of an `AnswerView`.
   */
  constructor(parts, { api, palette, tree, chats, read }, on) {
    Object.assign(this, { parts, api, palette, tree, chats, read, on });
    this.model = "";
  }

  /** Whether an answer is running. */
  get busy() {
    return this.#controller !== null;
  }

  /** Send a message, and show the answer while it streams. Does nothing if the settings are not valid. */
  async send(text) {
    const settings = this.read();
    if (!settings) return;
    const messages = [...this.#messages(), { role: "user", content: text }];
    const answer = new Answer({ model: this.model, messages, ...settings }, performance.now());
    const { view } = this.#add(text, answer, this.model || "model");
    this.keep();
    this.#keepEnd();
    this.tree.show(answer);
    await this.#run(answer, () => {
      view.update();
      this.tree.update(answer);
    });
    view.end();
    this.tree.update(answer);
    this.keep();
    this.#keepEnd();
  }

  /** Stop the running answer. Its text so far stays. */
  stop() {
    this.#controller?.abort();
  }

  /** Begin a new conversation. */
  async clear() {
    await this.#halt();
    this.#enter(newId(), []);
  }

  /** Show another conversation of this visit, or one that the browser has kept. */
  async open(id) {
    await this.#halt();
    const turns = this.#visited.get(id);
    this.#enter(id, turns ?? []);
    if (turns) return;
    for (const { text, answer } of this.chats.read(id) ?? []) {
      this.#add(text, Answer.kept(answer), answer.name).view.end();
    }
    this.#keepEnd();
  }

  /** Forget conversations. If one of them is shown, begin a new one. */
  drop(ids) {
    if (ids.includes(this.#id)) {
      this.stop();
      this.#enter(newId(), []);
    }
    for (const id of ids) this.#visited.delete(id);
  }

  /** Let the browser keep the conversation as it is now. */
  keep() {
    if (!this.#turns.length) return;
    const turns = this.#turns.map(({ text, answer, view }) => {
      return { text, answer: { name: view.name, text: answer.text, thoughts: answer.thoughts, facts: view.facts } };
    });
    this.chats.keep(this.#id, turns);
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

  #add(text, answer, name) {
    const turn = { text, answer };
    turn.view = new AnswerView(answer, name, this.palette, {
      point: this.on.point,
      step: (step) => this.tree.show(answer, step),
      compare: () => this.#compare(turn),
      retry: () => this.#restart(turn, turn.text),
    });
    const edit = el("button", { type: "button", class: "quiet", onclick: () => this.#edit(turn) }, "Edit");
    turn.question = el("article", { class: "turn question", "aria-label": "You" }, el("p", {}, text), edit);
    turn.element = el("div", {}, turn.question, turn.view.element);
    this.#turns.push(turn);
    this.parts.welcome.hidden = true;
    this.parts.list.append(turn.element);
    return turn;
  }

  /** Let the user change a message. Sent again, it takes the place of all turns from there on. */
  #edit(turn) {
    const shown = [...turn.question.childNodes];
    const box = el("textarea", { rows: Math.min(turn.text.split("\n").length + 1, 12), "aria-label": "Edited message" });
    box.value = turn.text;
    const cancel = () => {
      turn.question.replaceChildren(...shown);
      shown.at(-1).focus();
    };
    const submit = (event) => {
      event.preventDefault();
      const text = box.value.trim();
      if (text) this.#restart(turn, text);
    };
    const onkeydown = (event) => {
      if (event.key === "Escape") cancel();
      else if (isSend(event)) submit(event);
      else return;
      event.stopPropagation(); // Escape also stops answers
    };
    const buttons = el(
      "div",
      { class: "actions" },
      el("button", { type: "button", class: "quiet", onclick: cancel }, "Cancel"),
      el("button", { class: "main" }, "Send"),
    );
    turn.question.replaceChildren(el("form", { class: "edit", onsubmit: submit, onkeydown }, box, buttons));
    box.focus();
  }

  /** Ask for another answer to a message, in place of all turns from there on. */
  async #restart(turn, text) {
    await this.#halt();
    const at = this.#turns.indexOf(turn);
    if (at < 0 || !this.read()) return;
    for (const { element } of this.#turns.splice(at)) element.remove();
    this.on.focus();
    await this.send(text);
  }

  async #compare({ answer, view }) {
    if (this.busy) return;
    const plain = new Answer({ ...answer.body, speculation: false }, performance.now());
    view.compared(plain);
    await this.#run(plain, () => view.compared(plain));
    view.compared(plain);
    this.#keepEnd();
  }

  /** Stop the running answer, and wait until it has ended. */
  async #halt() {
    this.stop();
    await this.#running;
  }

  /** Show the turns of a conversation in place of those that are shown. */
  #enter(id, turns) {
    if (this.#turns.length) this.#visited.set(this.#id, this.#turns);
    for (const { element } of this.#turns) element.remove();
    this.#id = id;
    this.#turns = turns;
    this.parts.welcome.hidden = turns.length > 0;
    this.parts.list.append(...turns.map(({ element }) => element));
    this.tree.show(turns.at(-1)?.answer ?? null);
    this.chats.draw(id);
    this.#keepEnd();
  }

  /** Request an answer and read it to its end. Calls `draw` now and then. */
  #run(answer, draw) {
    this.#running = this.#follow(answer, draw);
    return this.#running;
  }

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

/** Whether a key sends the message: Enter alone. */
export function isSend({ key, shiftKey, isComposing }) {
  return key === "Enter" && !shiftKey && !isComposing;
}
