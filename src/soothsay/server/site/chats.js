/** The conversations that the browser keeps, and their list. */

import { el } from "./dom.js";
import { forget, kept, recall, remember } from "./store.js";

const MOST = 50; // conversations
const ROOM = 4_000_000; // characters of all of them; browsers have room for about five million
const TITLE = 60; // letters
const CHAT = "chat.";

const isText = (value) => typeof value === "string";

/** Whether a kept value is a conversation: `{at, turns: [{text, answer: {name, text, thoughts, facts}}]}`. */
function isChat(value) {
  const isTurn = ({ text, answer: { name, text: said, thoughts, facts } }) =>
    [text, name, said, thoughts, ...facts].every(isText);
  try {
    return Number.isFinite(value.at) && value.turns.length > 0 && value.turns.every(isTurn);
  } catch {
    return false;
  }
}

/** A short text for a conversation: the beginning of its first message. */
function title({ turns: [{ text }] }) {
  const letters = [...text.slice(0, 4 * TITLE).trim().replace(/\s+/g, " ")];
  return letters.length > TITLE ? `${letters.slice(0, TITLE - 1).join("")}…` : letters.join("");
}

export class Chats {
  #known = new Map(); // by id: {id, at, title, length}

  /**
   * `parts`: the elements `list`, `title` (of the current one), `empty` and `clear`. `on`: callbacks. `open(id)` when the
   * user chooses a conversation; `gone(ids)` before they are deleted.
   */
  constructor(parts, on) {
    Object.assign(this, { parts, on, current: null });
    addEventListener("storage", () => this.#load()); // another tab has kept or deleted one
    parts.clear.addEventListener("click", () => {
      const ids = [...this.#known.keys()];
      if (confirm(`Delete all conversations? This browser keeps ${ids.length}.`)) this.#remove(ids);
    });
    this.#load();
  }

  /** The turns of a conversation; null if it is not kept. */
  read(id) {
    const chat = recall(CHAT + id);
    return isChat(chat) ? chat.turns : null;
  }

  /** Keep a conversation. The oldest ones make room. */
  keep(id, turns) {
    const chat = { at: Date.now(), turns };
    const { length } = JSON.stringify(chat);
    const others = this.#newest().filter((one) => one.id !== id);
    let total = others.reduce((sum, one) => sum + one.length, length);
    let done = false;
    while (!done && length <= ROOM) {
      done = others.length < MOST && total <= ROOM && remember(CHAT + id, chat);
      if (done) this.#known.set(id, { id, at: chat.at, title: title(chat), length });
      else if (others.length) {
        const oldest = others.pop();
        this.#forget(oldest.id);
        total -= oldest.length;
      } else break;
    }
    this.draw(id, done);
  }

  /** Draw the list. `current`: the id of the conversation that is shown. `done`: whether there is room for it. */
  draw(current = this.current, done = true) {
    this.current = current;
    const { list, title, empty, clear } = this.parts;
    title.textContent = done ? (this.#known.get(current)?.title ?? "new") : "not kept: the browser has no room for it";
    empty.hidden = this.#known.size > 0;
    clear.hidden = !this.#known.size;
    list.replaceChildren(...this.#newest().map((chat) => this.#entry(chat)));
  }

  #entry({ id, title }) {
    const open = { "aria-current": id === this.current && "true", onclick: () => this.on.open(id) };
    const remove = { "aria-label": `Delete “${title}”`, onclick: () => this.#remove([id]) };
    const button = (attributes, text) => el("button", { type: "button", class: "quiet", ...attributes }, text);
    return el("li", {}, button(open, title), button(remove, "✕"));
  }

  #newest() {
    return [...this.#known.values()].sort((a, b) => b.at - a.at);
  }

  #remove(ids) {
    this.on.gone(ids);
    for (const id of ids) this.#forget(id);
    this.draw();
    this.parts.title.closest("summary").focus();
  }

  #forget(id) {
    forget(CHAT + id);
    this.#known.delete(id);
  }

  #load() {
    this.#known.clear();
    for (const { name, length } of kept(CHAT)) {
      const [id, chat] = [name.slice(CHAT.length), recall(name)];
      if (isChat(chat)) this.#known.set(id, { id, at: chat.at, title: title(chat), length });
      else forget(name); // no version of this page has kept that
    }
    this.draw();
  }
}
