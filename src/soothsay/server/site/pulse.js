/** Reads the server's state and metrics once a second, while the tab is visible. */

const PERIOD = 1000; // milliseconds

export class Pulse {
  #timer = null;
  #turn = null; // identifies the latest reading, so that older ones can be ignored

  /**
   * `on`: callbacks. `reading(seconds, text)` gets the metrics, if the key may read them. `state(name, text)` gets the state: ok, busy, locked or
   * lost. `found()` is called when the server answers for the first time, or again after a failure.
   */
  constructor(api, on) {
    Object.assign(this, { api, on, reached: false });
    document.addEventListener("visibilitychange", () => this.ask());
  }

  /** Read now and once a second from now on. Stops while the tab is hidden. */
  async ask() {
    clearTimeout(this.#timer);
    this.#turn = null;
    if (document.hidden) return;
    const turn = (this.#turn = {});
    try {
      const health = await this.api.health();
      if (turn !== this.#turn) return;
      const text = await this.api.metrics();
      if (turn !== this.#turn) return; // the tab was hidden, or a newer reading has begun
      if (!this.reached) await this.on.found();
      this.reached = true;
      if (health === "ok") this.on.state("ok", "ready");
      else this.on.state("busy", health);
      if (text !== null) this.on.reading(performance.now() / 1000, text);
    } catch (error) {
      if (turn !== this.#turn) return;
      this.reached = false;
      if (error.code === "invalid_api_key") this.on.state("locked", "needs an API key");
      else this.on.state("lost", "no connection, trying again");
    }
    if (turn === this.#turn) this.#timer = setTimeout(() => this.ask(), PERIOD);
  }
}
