/** Small charts of the server's last minute. */

import { el, rounded, svg } from "./dom.js";

const SECONDS = 60;
const BREAK = 3.5; // a longer time without a reading, in seconds, interrupts a line
const [WIDTH, HEIGHT] = [200, 60]; // size in the drawing's own units; the drawing is stretched to its place
const RATE = 1; // seconds over which rates are taken
const MEAN = 5; // seconds over which means are taken

const one = (value) => new Map(value === null ? [] : [["", value]]);
const perSecond = (history, name) => {
  const rise = history.rise(name, RATE);
  return one(rise && rise.by / rise.seconds);
};
const eachPerSecond = (history, name, label) => {
  const rise = history.riseBy(name, label, RATE);
  return new Map(rise ? [...rise.by].map(([key, by]) => [key, by / rise.seconds]) : []);
};
const accepted = (history) => {
  const tokens = history.rise("spec_decode_num_accepted_tokens_total", MEAN);
  const steps = history.rise("decode_steps_total", MEAN);
  return one(tokens && steps?.by > 0 ? 1 + tokens.by / steps.by : null);
};

/** The charts. `read(history)` returns a value for each part; `least` is the smallest top of the scale. */
export const CHARTS = [
  { title: "Tokens a second", least: 10, read: (history) => perSecond(history, "generation_tokens_total") },
  { title: "Tokens a step", least: 2, floor: 1, read: accepted },
  {
    title: "First token after",
    unit: "ms",
    least: 10,
    read: (history) => {
      const mean = history.mean("time_to_first_token_seconds", MEAN);
      return one(mean === null ? null : mean * 1000);
    },
  },
  {
    title: "KV cache in use",
    unit: "%",
    least: 1,
    read: (history) => {
      const share = history.now("kv_cache_usage_perc");
      return one(share === null ? null : share * 100);
    },
  },
  {
    title: "Answers running",
    least: 4,
    parts: true,
    read: (history) =>
      new Map(
        ["running", "waiting"].flatMap((state) => {
          const number = history.now(`num_requests_${state}`);
          return number === null ? [] : [[state, number]];
        }),
      ),
  },
  {
    title: "Accepted a second",
    least: 10,
    parts: true,
    stacked: true,
    drafters: true,
    read: (history) => eachPerSecond(history, "spec_decode_num_accepted_tokens_per_pos_total", "drafter"),
  },
  {
    title: "Controller's choices",
    least: 10,
    parts: true,
    stacked: true,
    drafters: true,
    read: (history) => eachPerSecond(history, "controller_decisions_total", "choice"),
  },
];

export class Chart {
  #points = [];
  #parts = new Map(); // name -> {area, line, value}

  /** `spec`: one of `CHARTS`. The property `element` is the chart's element. */
  constructor(spec, palette) {
    this.spec = spec;
    this.palette = palette;
    this.value = el("span", { class: "value" }, "–");
    this.top = el("span", { class: "top", "aria-hidden": "true" });
    const box = { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none" };
    this.picture = svg("svg", { ...box, "aria-hidden": "true" });
    this.key = el("ul", { class: "key" });
    this.element = el(
      "figure",
      { class: "chart", "aria-label": spec.title, "data-chart": spec.title },
      el("figcaption", {}, el("span", { class: "title" }, spec.title), this.value),
      el("div", { class: "plot" }, this.picture, this.top),
    );
    if (spec.parts) this.element.append(this.key);
  }

  /** Add the history's values at the time `at` (seconds), and draw. */
  push(at, history) {
    this.#points.push({ at, values: this.spec.read(history) });
    this.#points = this.#points.filter((point) => at - point.at <= SECONDS + 1);
    for (const name of this.#points.at(-1).values.keys()) if (!this.#parts.has(name)) this.#add(name);
    this.#draw(at);
  }

  #add(name) {
    const part = { area: svg("path", { class: "area" }), line: svg("path", { class: "line" }) };
    const drafter = this.spec.drafters && name !== "none" ? name : null;
    const kind = this.spec.drafters ? drafter === null ? "nobody" : "drafter" : `part${this.#parts.size}`;
    for (const path of Object.values(part)) this.palette.paint(path, drafter).classList.add(kind);
    this.picture.append(part.area, part.line);
    if (this.spec.parts) {
      part.value = el("span", { class: "number" });
      const swatch = el("span", { class: "swatch", "aria-hidden": "true" });
      const item = el("li", { class: kind }, swatch, `${name} `, part.value);
      this.key.append(this.palette.paint(item, drafter));
    }
    this.#parts.set(name, part);
  }

  #draw(now) {
    const { stacked, floor = 0, least, unit = "" } = this.spec;
    const total = (values) => [...values.values()].reduce((a, b) => a + b, 0);
    const height = (values) => (stacked ? total(values) : Math.max(0, ...values.values()));
    const top = nice(Math.max(least, ...this.#points.map(({ values }) => height(values))));
    const x = (at) => WIDTH * (1 - (now - at) / SECONDS);
    const y = (value) => HEIGHT - 1 - (HEIGHT - 3) * Math.max(0, (value - floor) / (top - floor));
    const below = new Map(this.#points.map((point) => [point, floor]));
    for (const [name, { area, line, value }] of this.#parts) {
      const pieces = runs(this.#points, name).map((run) =>
        run.map((point) => {
          const low = stacked ? below.get(point) : floor;
          const high = (stacked ? low : 0) + point.values.get(name);
          below.set(point, high);
          return [x(point.at), y(low), y(high)].map((number) => number.toFixed(1));
        }),
      );
      line.setAttribute("d", pieces.map((piece) => `M${upper(piece).join("L")}`).join(""));
      area.setAttribute("d", pieces.map((piece) => `M${[...upper(piece), ...lower(piece)].join("L")}Z`).join(""));
      const latest = this.#points.at(-1).values.get(name);
      if (value) value.textContent = latest === undefined ? "–" : rounded(latest);
    }
    const [first, ...others] = this.#points.at(-1).values.values();
    const value = stacked ? [first, ...others].reduce((a, b) => a + b) : first;
    this.value.textContent = value === undefined ? "–" : `${rounded(value)}${unit && `\u202f${unit}`}`;
    this.top.textContent = `${rounded(top)}${unit && `\u202f${unit}`}`;
  }
}

/** Runs of points that have values of a part. A run ends where the next point is more than `BREAK` later. */
function runs(points, name) {
  const found = [];
  let before = -Infinity;
  for (const point of points) {
    if (!point.values.has(name)) continue;
    if (point.at - before > BREAK) found.push([]);
    found.at(-1).push(point);
    before = point.at;
  }
  return found;
}

const upper = (piece) => piece.map(([x, , high]) => `${x} ${high}`);
const lower = (piece) => piece.map(([x, low]) => `${x} ${low}`).reverse();

/** The smallest number that is 1, 2 or 5 times a power of ten and not below a value. */
function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}
