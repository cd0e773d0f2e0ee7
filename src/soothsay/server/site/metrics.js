/** Parses the server's metrics, and computes their changes between readings. */

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)(?: \d+)?$/;
const LABEL = /([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"/g;
const SLACK = 0.5; // a reading may be early by this many seconds
const PREFIX = "soothsay:";
const ESCAPES = { n: "\n", "\\": "\\", '"': '"' };

/** Parse the text format of Prometheus: a map from names, without prefix, to lists of `{labels, value}`. */
export function parse(text) {
  const samples = new Map();
  for (const line of text.split("\n")) {
    const match = LINE.exec(line);
    if (!match) continue;
    const [, name, given = "", value] = match;
    const labels = {};
    for (const [, label, written] of given.matchAll(LABEL)) {
      labels[label] = written.replace(/\\(.)/g, (_, letter) => ESCAPES[letter] ?? letter);
    }
    const key = name.startsWith(PREFIX) ? name.slice(PREFIX.length) : name;
    if (!samples.has(key)) samples.set(key, []);
    samples.get(key).push({ labels, value: Number(value) });
  }
  return samples;
}

/** The readings of the last seconds, with rates and means over them. */
export class History {
  #readings = [];

  /** `seconds`: how long to keep a reading. */
  constructor(seconds) {
    this.seconds = seconds;
  }

  /** Add a reading. `at`: its time in seconds. */
  push(at, samples) {
    this.#readings.push({ at, samples });
    this.#readings = this.#readings.filter((reading) => at - reading.at <= this.seconds);
  }

  /** The latest value of a gauge; null if there is none. */
  now(name) {
    const samples = this.#readings.at(-1)?.samples.get(name);
    return samples ? sum(samples) : null;
  }

  /** The rise of a counter over about `seconds`: `{by, seconds}` with the exact time; null if unknown. */
  rise(name, seconds) {
    const parts = this.riseBy(name, null, seconds);
    return parts && { by: [...parts.by.values()].reduce((a, b) => a + b, 0), seconds: parts.seconds };
  }

  /** Like `rise`, but `by` is a map with the rise for each value of a label. */
  riseBy(name, label, seconds) {
    const last = this.#readings.at(-1);
    const past = this.#readings.findLast((reading) => last.at - reading.at >= seconds - SLACK);
    const first = past ?? this.#readings[0];
    if (!last || first === last) return null;
    const before = byLabel(first.samples.get(name) ?? [], label);
    const by = new Map();
    for (const [value, total] of byLabel(last.samples.get(name) ?? [], label)) {
      const rise = total - (before.get(value) ?? 0);
      if (rise < 0) return null; // the server was restarted
      by.set(value, rise);
    }
    return { by, seconds: last.at - first.at };
  }

  /** The mean of a histogram's values over about `seconds`; null if there were none. */
  mean(name, seconds) {
    const total = this.rise(`${name}_sum`, seconds);
    const seen = this.rise(`${name}_count`, seconds);
    return total && seen?.by > 0 ? total.by / seen.by : null;
  }
}

function sum(samples) {
  return samples.reduce((total, { value }) => total + value, 0);
}

function byLabel(samples, label) {
  const totals = new Map();
  for (const { labels, value } of samples) {
    const key = label === null ? "" : (labels[label] ?? "");
    totals.set(key, (totals.get(key) ?? 0) + value);
  }
  return totals;
}
