/** Draws the draft tree of one step, and lets the user walk through the steps of an answer. */

import { count, onPaint, svg, visible } from "./dom.js";
import { attach } from "./tip.js";

// sizes in CSS pixels, for the font size of nodes in style.css
const LETTER = 7.3; // width of a letter
const LONGEST = 14; // limit of letters in a label
const PADDING = 9;
const HEIGHT = 24;
const ROW = 32;
const GAP = 26; // between columns
const MARGIN = 6;
const SMALLEST = 0.75; // smallest scale; a larger drawing scrolls instead
const PACE = 400; // milliseconds for each step of a replay

/**
 * Place the nodes of a step: `{nodes, width, height}`. A node has `parent` (an index into `nodes`, or -1), `kind`
 * (root, accepted, rejected or bonus), `text`, `drafter` and a box. The accepted path is the top line.
 */
export function layout(step) {
  const path = new Set(step.accepted);
  const kind = (node) => (node === 0 ? "root" : path.has(node) ? "accepted" : "rejected");
  const nodes = step.tokens.map((text, node) => ({
    text,
    parent: step.parents[node],
    drafter: step.drafters[node],
    kind: kind(node),
  }));
  nodes.push({ text: step.bonus, parent: step.accepted.at(-1) ?? 0, drafter: null, kind: "bonus" });
  const children = nodes.map(() => []);
  nodes.forEach(({ parent }, node) => parent >= 0 && children[parent].push(node));
  for (const siblings of children) {
    siblings.sort((a, b) => (nodes[a].kind === "rejected") - (nodes[b].kind === "rejected") || a - b);
  }
  const columns = [];
  let rows = 0;
  const place = (node, depth) => {
    const one = nodes[node];
    const letters = [...visible(one.text)];
    one.label = letters.length > LONGEST ? `${letters.slice(0, LONGEST - 1).join("")}…` : letters.join("");
    one.width = Math.max([...one.label].length, 2) * LETTER + 2 * PADDING;
    one.depth = depth;
    one.y = MARGIN + rows * ROW;
    columns[depth] = Math.max(columns[depth] ?? 0, one.width);
    if (!children[node].length) rows += 1;
    for (const child of children[node]) place(child, depth + 1);
  };
  place(0, 0);
  const lefts = columns.map((_, depth) => columns.slice(0, depth).reduce((sum, width) => sum + width + GAP, MARGIN));
  for (const node of nodes) node.x = lefts[node.depth];
  return {
    nodes,
    width: lefts.at(-1) + columns.at(-1) + MARGIN,
    height: 2 * MARGIN + (rows - 1) * ROW + HEIGHT,
  };
}

/** A step in one sentence. */
export function summary(step) {
  const drafted = step.tokens.length - 1;
  if (!drafted) return "Nothing was drafted; the model added one token.";
  return `${step.accepted.length} of ${count(drafted, "draft token")} accepted, plus the model's own.`;
}

/** A step in words, for screen readers. */
function description(step) {
  const named = (node) => `“${visible(step.tokens[node])}” by ${step.drafters[node]}`;
  const path = new Set(step.accepted);
  const rest = step.tokens.map((_, node) => node).filter((node) => node && !path.has(node));
  return [
    `Draft tree after “${visible(step.tokens[0])}”.`,
    path.size ? `Accepted: ${step.accepted.map(named).join(", ")}.` : "Nothing accepted.",
    rest.length ? `Rejected: ${rest.map(named).join(", ")}.` : "",
    `The model added “${visible(step.bonus)}”.`,
  ].join(" ");
}

function edge(from, to) {
  const [x, y] = [from.x + from.width, from.y + HEIGHT / 2];
  const [end, level] = [to.x, to.y + HEIGHT / 2];
  const bend = Math.min(GAP, end - x) / 2;
  return `M${x} ${y}C${end - bend} ${y} ${end - 2 * bend} ${level} ${end} ${level}`;
}

export class TreePanel {
  #answer = null;
  #step = 0;
  #follows = true;
  #replay = null;
  #drawn = null;
  #schedule = onPaint(() => this.#draw());

  /**
   * `parts`: the elements `drawing`, `empty`, `caption`, `slider`, `position`, `back`, `on` and `replay`.
   * `onstep(answer, step)` is called when a step is shown.
   */
  constructor(parts, palette, onstep) {
    this.parts = parts;
    this.palette = palette;
    this.onstep = onstep;
    parts.slider.addEventListener("input", () => this.#walk(Number(parts.slider.value) - 1));
    parts.back.addEventListener("click", () => this.#walk(this.#step - 1));
    parts.on.addEventListener("click", () => this.#walk(this.#step + 1));
    parts.replay.addEventListener("click", () => (this.#replay ? this.#pause() : this.#play()));
    new ResizeObserver(() => this.#fit()).observe(parts.drawing);
    this.#draw();
  }

  /** Show a step of an answer. Without `step`, show its latest step, and follow new ones. */
  show(answer, step = null) {
    this.#pause();
    this.#answer = answer;
    this.#follows = step === null;
    this.#step = step ?? 0;
    this.#draw();
  }

  /** Draw again if this answer is shown, since it may have more steps. */
  update(answer) {
    if (answer === this.#answer) this.#schedule();
  }

  #walk(step) {
    this.#pause();
    this.#go(step);
  }

  #go(step) {
    const last = this.#answer.steps.length - 1;
    this.#step = Math.min(Math.max(step, 0), last);
    this.#follows = this.#answer.running && this.#step === last;
    this.#draw();
  }

  #play() {
    if (this.#step >= this.#answer.steps.length - 1) this.#go(0);
    this.#replay = setInterval(() => {
      this.#go(this.#step + 1);
      if (this.#step >= this.#answer.steps.length - 1) this.#pause();
    }, PACE);
    this.#draw();
  }

  #pause() {
    clearInterval(this.#replay);
    this.#replay = null;
    this.parts.replay.textContent = "Replay";
  }

  #draw() {
    const { drawing, caption, slider, position, back, on, replay, empty } = this.parts;
    const steps = this.#answer?.steps ?? [];
    if (this.#follows) this.#step = Math.max(steps.length - 1, 0); // steps may have come since `update`
    const step = steps[this.#step];
    drawing.hidden = !step;
    empty.hidden = Boolean(step);
    for (const control of [slider, back, on, replay]) control.disabled = steps.length < 2;
    position.textContent = step ? `${this.#step + 1} / ${steps.length}` : "–";
    caption.textContent = step ? summary(step) : "";
    if (!step) {
      this.#drawn = null;
      return;
    }
    slider.max = steps.length;
    slider.value = this.#step + 1;
    slider.setAttribute("aria-valuetext", `Step ${this.#step + 1} of ${steps.length}: ${summary(step)}`);
    if (this.#replay) replay.textContent = "Pause";
    if (this.#drawn?.step !== step) {
      const { nodes, width, height } = layout(step);
      const picture = svg("svg", { role: "img", "aria-label": description(step) });
      for (const node of nodes.filter(({ parent }) => parent >= 0).reverse()) {
        const line = svg("path", { class: `edge ${node.kind}`, d: edge(nodes[node.parent], node) });
        picture.append(this.palette.paint(line, node.drafter));
      }
      for (const node of nodes) picture.append(this.#node(node));
      drawing.replaceChildren(picture);
      this.#drawn = { step, picture, width, height };
      this.#fit();
    }
    this.onstep(this.#answer, this.#step);
  }

  #node({ x, y, width, text, label, kind, drafter }) {
    const group = svg(
      "g",
      { class: `node ${kind}` },
      svg("rect", { x, y, width, height: HEIGHT, rx: 7 }),
      svg("text", { x: x + width / 2, y: y + HEIGHT / 2 }, label),
    );
    if (drafter !== null) {
      group.append(svg("line", { x1: x + PADDING, x2: x + width - PADDING, y1: y + HEIGHT - 4, y2: y + HEIGHT - 4 }));
    }
    return this.palette.paint(attach(group, { token: visible(text), drafter, kind }), drafter);
  }

  #fit() {
    if (!this.#drawn) return;
    const { picture, width, height } = this.#drawn;
    const { clientWidth, clientHeight } = this.parts.drawing;
    const scale = Math.max(Math.min(1, clientWidth / width, clientHeight / height), SMALLEST);
    picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
    picture.setAttribute("width", width * scale);
    picture.setAttribute("height", height * scale);
  }
}
