/** Colours of drafters: the same everywhere on the page and, as far as there are enough, on every other day. */

const COLOURS = 8; // as many as style.css has

/** What tokens are called that no drafter had guessed. */
export const TARGET = "target";

export class Palette {
  #slots = new Map();

  /** Give an element the colour of a drafter; null is the target, which has none. */
  paint(node, drafter) {
    if (drafter === null) return node;
    if (!this.#slots.has(drafter)) this.#slots.set(drafter, this.#choose(drafter));
    node.dataset.drafter = this.#slots.get(drafter);
    return node;
  }

  /** The name's own colour, or the next that is free. */
  #choose(name) {
    const own = [...name].reduce((sum, letter) => sum + letter.codePointAt(0), 0) % COLOURS;
    const taken = new Set(this.#slots.values());
    const free = Array.from({ length: COLOURS }, (_, step) => (own + step) % COLOURS).find((slot) => !taken.has(slot));
    return free ?? own;
  }
}
