/** Colours of drafters. A drafter has one colour on the whole page, and the same after a reload if it is free. */

const COLOURS = 8; // the number of colours in style.css

/** Label of tokens that the target model added itself. */
export const TARGET = "target";

export class Palette {
  #slots = new Map();

  /** Give an element the colour of a drafter. Null is the target, which has no colour. */
  paint(node, drafter) {
    if (drafter === null) return node;
    if (!this.#slots.has(drafter)) this.#slots.set(drafter, this.#choose(drafter));
    node.dataset.drafter = this.#slots.get(drafter);
    return node;
  }

  /** The colour that follows from the name, or the next free one. */
  #choose(name) {
    const own = [...name].reduce((sum, letter) => sum + letter.codePointAt(0), 0) % COLOURS;
    const taken = new Set(this.#slots.values());
    const free = Array.from({ length: COLOURS }, (_, step) => (own + step) % COLOURS).find((slot) => !taken.has(slot));
    return free ?? own;
  }
}
