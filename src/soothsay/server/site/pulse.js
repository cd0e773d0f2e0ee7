/** Asks the server how it is, once a second while somebody looks. */

const PERIOD = 1000; // milliseconds

export class Pulse {
  #timer = null;
  #turn = null; // the latest asking; those before it are forgotten

  /**
   * `on`: `beat(seconds, text)` for each reading of the metrics, `state(name, text)`, where name is ok, busy, locked
   * or lost, and `found()` when the server answers after it did not.
   */
  constructor(api, on) {
    Object.assign(this, { api, on, reached: false });
    document.addEventListener("visibilitychange", () => this.ask());
  }

  /** Ask now, and go on asking; or rest, while nobody looks. */
  async ask() {
    clearTimeout(this.#timer);
    this.#turn = null;
    if (document.hidden) return;
    const turn = (this.#turn = {});
    try {
      const health = await this.api.health();
      const text = await this.api.metrics();
      if (turn !== this.#turn) return; // the tab was left, or it was asked again
      if (!this.reached) await this.on.found();
      this.reached = true;
      if (health === "ok") this.on.state("ok", "ready");
      else this.on.state("busy", health);
      this.on.beat(performance.now() / 1000, text);
    } catch (error) {
      if (turn !== this.#turn) return;
      this.reached = false;
      if (error.code === "invalid_api_key") this.on.state("locked", "needs an API key");
      else this.on.state("lost", "no connection, trying again");
    }
    if (turn === this.#turn) this.#timer = setTimeout(() => this.ask(), PERIOD);
  }
}
