/** The form with the settings of an answer. The browser keeps them. */

import { recall, remember } from "./store.js";

export class Settings {
  #chosen = ""; // the drafter that was chosen, which this server may not have

  /** `form`: the form. Its fields are found by their ids. */
  constructor(form) {
    this.form = form;
    this.fields = form.elements;
    this.#recall();
    form.addEventListener("input", ({ target }) => {
      if (target === this.fields.drafter) this.#chosen = target.value;
      const values = [...this.fields].map((field) => [field.id, field.type === "checkbox" ? field.checked : field.value]);
      remember("settings", { ...Object.fromEntries(values), drafter: this.#chosen });
      this.#enable();
    });
    form.addEventListener("submit", (event) => event.preventDefault());
    this.#enable();
  }

  /** Offer what a model has: its drafters, of which the first is the server's own, and tokens up to its context. */
  offer({ drafters: [own, ...others], max_model_len: context }) {
    const { drafter, "max-tokens": tokens } = this.fields;
    const names = others.filter((name) => name !== "none"); // the switch "Speculate" does that
    drafter.replaceChildren(new Option(own, ""), ...names.map((name) => new Option(name, name)));
    if (names.includes(this.#chosen)) drafter.value = this.#chosen;
    tokens.max = context;
    tokens.placeholder = `≤ ${context}`;
    tokens.title = `Without a number, an answer may fill the context of ${context} tokens`;
  }

  /**
   * The fields of a request; null if the form is not valid: then it shows what is wrong. There is always a seed, so that
   * the same answer can be requested again.
   */
  read() {
    if (!this.form.checkValidity()) {
      this.form.closest("details").open = true;
      this.form.reportValidity();
      return null;
    }
    const { fields } = this;
    const number = ({ value }) => (value === "" ? null : Number(value));
    return {
      temperature: number(fields.temperature),
      top_p: number(fields["top-p"]),
      max_tokens: number(fields["max-tokens"]),
      seed: number(fields.seed) ?? crypto.getRandomValues(new Uint32Array(1))[0],
      speculation: fields.speculate.checked && {
        drafter: fields.drafter.value || null,
        max_nodes: number(fields["max-nodes"]),
        trace: true,
      },
    };
  }

  #recall() {
    const values = recall("settings") ?? {};
    for (const field of this.fields) {
      const value = values[field.id];
      if (field.type === "checkbox" && typeof value === "boolean") field.checked = value;
      else if (field.type === "number" && typeof value === "string" && Number.isFinite(Number(value))) field.value = value;
    }
    if (typeof values.drafter === "string") this.#chosen = values.drafter;
  }

  #enable() {
    const { speculate, drafter, "max-nodes": nodes } = this.fields;
    drafter.disabled = nodes.disabled = !speculate.checked;
  }
}
