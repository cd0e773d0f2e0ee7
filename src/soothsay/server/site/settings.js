/** How to answer, as the form says. */

export class Settings {
  /** `form`: the form; its fields are found by their ids. */
  constructor(form) {
    this.form = form;
    this.fields = form.elements;
    this.fields.speculate.addEventListener("change", () => this.#enable());
    form.addEventListener("submit", (event) => event.preventDefault());
    this.#enable();
  }

  /** Offer the drafters of a model's card; the first is the server's own. */
  offer([own, ...others]) {
    const { drafter } = this.fields;
    const chosen = drafter.value;
    const names = others.filter((name) => name !== "none"); // that is what the switch is for
    drafter.replaceChildren(new Option(own, ""), ...names.map((name) => new Option(name, name)));
    if (names.includes(chosen)) drafter.value = chosen;
  }

  /** Show what is wrong with the form, if anything is; whether it is fine. */
  check() {
    if (this.form.checkValidity()) return true;
    this.form.closest("details").open = true;
    return this.form.reportValidity();
  }

  /** Fields of a request. A seed is always among them, so that the same can be asked for again. */
  read() {
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

  #enable() {
    const { speculate, drafter, "max-nodes": nodes } = this.fields;
    drafter.disabled = nodes.disabled = !speculate.checked;
  }
}
