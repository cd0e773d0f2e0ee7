/** The form with the settings of an answer. */

export class Settings {
  /** `form`: the form. Its fields are found by their ids. */
  constructor(form) {
    this.form = form;
    this.fields = form.elements;
    this.fields.speculate.addEventListener("change", () => this.#enable());
    form.addEventListener("submit", (event) => event.preventDefault());
    this.#enable();
  }

  /** Offer the drafters of a model. The first one is the server's own. */
  offer([own, ...others]) {
    const { drafter } = this.fields;
    const chosen = drafter.value;
    const names = others.filter((name) => name !== "none"); // the switch "Speculate" does that
    drafter.replaceChildren(new Option(own, ""), ...names.map((name) => new Option(name, name)));
    if (names.includes(chosen)) drafter.value = chosen;
  }

  /** Whether the form is valid. If not, show what is wrong. */
  check() {
    if (this.form.checkValidity()) return true;
    this.form.closest("details").open = true;
    return this.form.reportValidity();
  }

  /** The fields of a request. They always have a seed, so that the same answer can be requested again. */
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
