/** What is told of a token under the pointer, or under the cursor of the keys. */

import { TARGET } from "./palette.js";
import { el } from "./dom.js";

const WHAT = {
  accepted: (author) => `guessed by ${author}, and held`,
  rejected: (author) => `guessed by ${author}, rejected`,
  bonus: () => "the target's own",
  root: () => "the last token before this step",
};

/** Give an element what there is to tell of its token. `kind` is one of a tree's nodes. */
export function tell(element, { token, drafter, kind, step = null }) {
  Object.assign(element.dataset, { token, author: drafter ?? TARGET, kind });
  if (step !== null) element.dataset.step = step;
  return element;
}

/** What there is to tell, in one line. */
export function told({ dataset: { token, author, kind, step } }) {
  return `“${token}”, ${WHAT[kind](author)}${step === undefined ? "" : `, step ${Number(step) + 1}`}`;
}

export class Tip {
  /** `box` is where it is told; elements that `tell` was called for are watched. */
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
    this.box.replaceChildren(el("strong", {}, token), el("span", {}, WHAT[kind](author)), ...where);
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
