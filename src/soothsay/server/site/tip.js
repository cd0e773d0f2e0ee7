/** The tooltip of a token under the pointer or the keyboard's cursor. */

import { TARGET } from "./palette.js";
import { el } from "./dom.js";

const KINDS = {
  accepted: (author) => `drafted by ${author}, accepted`,
  rejected: (author) => `drafted by ${author}, rejected`,
  bonus: () => "added by the model itself",
  root: () => "the last token before this step",
};

/** Attach the facts of a token to its element, for `Tip` and `description`. `kind`: a kind of tree node. */
export function attach(element, { token, drafter, kind, step = null }) {
  Object.assign(element.dataset, { token, author: drafter ?? TARGET, kind });
  if (step !== null) element.dataset.step = step;
  return element;
}

/** The facts of an element's token, in one line. */
export function description({ dataset: { token, author, kind, step } }) {
  return `“${token}”, ${KINDS[kind](author)}${step === undefined ? "" : `, step ${Number(step) + 1}`}`;
}

export class Tip {
  /** `box`: the element of the tooltip. It shows the facts of elements that `attach` was called for. */
  constructor(box) {
    this.box = box;
    document.addEventListener("pointerover", ({ target }) => {
      const element = target.closest("[data-token]");
      if (element) this.show(element);
      else this.hide();
    });
    document.addEventListener("scroll", () => this.hide(), { capture: true, passive: true });
    document.addEventListener("keydown", ({ key }) => key === "Escape" && this.hide());
  }

  show(element) {
    const { token, author, kind, step } = element.dataset;
    const where = step === undefined ? [] : [el("span", {}, `step ${Number(step) + 1}`)];
    this.box.replaceChildren(el("strong", {}, token), el("span", {}, KINDS[kind](author)), ...where);
    this.box.hidden = false;
    const at = element.getClientRects()[0];
    const { width, height } = this.box.getBoundingClientRect();
    const left = Math.min(Math.max(at.left + at.width / 2 - width / 2, 4), innerWidth - width - 4);
    const above = at.top - height - 6;
    this.box.style.translate = `${left}px ${above < 4 ? at.bottom + 6 : above}px`;
  }

  hide() {
    this.box.hidden = true;
  }
}
