/**
 * Shows Markdown while it is written. All of it becomes elements of a few harmless kinds, and text: HTML stays text,
 * images become links, and only links to the web and to mail addresses become links.
 *
 * Each line is looked at once, and no expression can look at a text more than a few times. Nesting has a limit.
 */

import { CodeBlock } from "./code.js";
import { el } from "./dom.js";

const DEEPEST = 6; // lists and quotes in one another; deeper ones are text
const NESTED = 8; // emphases in one another
const LONGEST = 10_000; // characters; a longer line, and a longer paragraph, is plain text
const LARGE = 4000; // characters; a larger open block is drawn again only when it has grown by one part in `PARTS`
const PARTS = 200;
const UNSURE = 2; // last lines, which may still change what the text before them is

const FENCE = /^( *)(`{3,}(?=[^`]*$)|~{3,}(?!~))(.*)$/;
const FENCE_END = /^ *(`{3,}|~{3,}) *$/;
const HEADING = /^ {0,3}(#{1,6})(?: (.*))?$/;
const RULE = /^ {0,3}(?:(?:\* *){3,}|(?:- *){3,}|(?:_ *){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?: (.*))?$/;
const TASK = /^\[([ xX])\] /;
const DIVIDER = /^[ |:-]+$/;

const isBlank = (line) => line === undefined || !line.trim();
const indent = (line) => line.length - line.trimStart().length;
const outdent = (line, size) => line.slice(Math.min(indent(line), size));
const isOrdered = (marker) => marker.length > 1;

function cells(line) {
  const inside = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inside.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function isTable(lines, at) {
  const [head, divider = ""] = [lines[at], lines[at + 1]];
  if (!head.includes("|") || !divider.includes("-") || !divider.includes("|") || !DIVIDER.test(divider)) return false;
  return cells(head).length === cells(divider).length;
}

/** Whether a line begins a block that is no paragraph. */
function begins(lines, at) {
  const line = lines[at];
  return line.length <= LONGEST && ([FENCE, HEADING, RULE, QUOTE, ITEM].some((one) => one.test(line)) || isTable(lines, at));
}

/** Readers of blocks. Each returns a block and the number of the line after it, or null if none of its kind begins. */
const READERS = [
  function fence(lines, at) {
    const [, space, mark, info] = FENCE.exec(lines[at]) ?? [];
    if (mark === undefined) return null;
    let next = at + 1;
    const isEnd = (line) => FENCE_END.exec(line)?.[1].startsWith(mark);
    while (next < lines.length && !isEnd(lines[next])) next += 1;
    const ended = next < lines.length;
    const code = lines.slice(at + 1, next).map((line) => outdent(line, space.length));
    const text = code.join("\n") + (ended && code.length ? "\n" : "");
    return { kind: "code", language: info.trim().split(/\s/)[0], text, next: next + ended };
  },
  function heading(lines, at) {
    const [, marks, text = ""] = HEADING.exec(lines[at]) ?? [];
    if (marks === undefined) return null;
    return { kind: "heading", level: marks.length, text: text.replace(/(?<=^| )#+ *$/, "").trim(), next: at + 1 };
  },
  function rule(lines, at) {
    return RULE.test(lines[at]) ? { kind: "rule", next: at + 1 } : null;
  },
  function quote(lines, at) {
    let next = at;
    while (next < lines.length && QUOTE.test(lines[next])) next += 1;
    if (next === at) return null;
    return { kind: "quote", lines: lines.slice(at, next).map((line) => line.replace(QUOTE, "")), next };
  },
  function list(lines, at) {
    const [, space, marker] = ITEM.exec(lines[at]) ?? [];
    if (marker === undefined) return null;
    const items = [];
    let [next, inside] = [at, 0];
    const continues = (line) => indent(line) >= space.length + 2;
    const item = (line) => {
      const match = ITEM.exec(line);
      const isNext = match && !continues(line) && !RULE.test(line) && isOrdered(match[2]) === isOrdered(marker);
      return isNext ? match : null;
    };
    while (next < lines.length) {
      const line = lines[next];
      const match = item(line);
      if (match) {
        items.push([match[3] ?? ""]);
        inside = match[1].length + match[2].length + 1;
      } else if (isBlank(line)) {
        let later = next;
        while (later < lines.length && isBlank(lines[later])) later += 1;
        if (later === lines.length || !(item(lines[later]) || continues(lines[later]))) break;
        items.at(-1).push("");
        next = later;
        continue;
      } else if (continues(line) || !(isBlank(lines[next - 1]) || begins(lines, next))) {
        items.at(-1).push(outdent(line, inside));
      } else break;
      next += 1;
    }
    return { kind: "list", ordered: isOrdered(marker), start: parseInt(marker, 10), items, next };
  },
  function table(lines, at) {
    if (!isTable(lines, at)) return null;
    let next = at + 2;
    while (next < lines.length && lines[next].includes("|") && lines[next].length <= LONGEST) next += 1;
    const aligned = (cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "end") : "start");
    const [head, divider, ...rows] = lines.slice(at, next).map(cells);
    return { kind: "table", head, rows, aligned: divider.map(aligned), next };
  },
];

/** The blocks of some lines. A block has a `kind`, and `first`: the number of its first line. */
function parse(lines, depth = 0) {
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (isBlank(lines[at])) {
      at += 1;
      continue;
    }
    let block = null;
    if (lines[at].length <= LONGEST && depth < DEEPEST) {
      for (const reader of READERS) if ((block = reader(lines, at))) break;
    }
    if (!block) {
      let next = at + 1;
      while (next < lines.length && !isBlank(lines[next]) && !(depth < DEEPEST && begins(lines, next))) next += 1;
      block = { kind: "paragraph", text: lines.slice(at, next).join("\n").trim(), next };
    }
    blocks.push({ ...block, first: at });
    at = block.next;
  }
  return blocks;
}

const DRAWERS = {
  code({ language, text }) {
    const block = new CodeBlock(language);
    block.update(text);
    return block.element;
  },
  heading: ({ level, text }) => el(`h${Math.min(level + 3, 6)}`, { class: `level${level}` }, ...inline(text)),
  list({ ordered, start, items }, depth) {
    const list = ordered ? el("ol", { start }) : el("ul");
    list.append(...items.map((lines) => el("li", { class: TASK.test(lines[0]) && "task" }, ...item(lines, depth + 1))));
    return list;
  },
  paragraph: ({ text }) => el("p", {}, ...inline(text)),
  quote: ({ lines }, depth) => el("blockquote", {}, ...draw(lines, depth + 1)),
  rule: () => el("hr"),
  table({ head, rows, aligned }) {
    const cell = (tag, text, column) => {
      const made = el(tag, {}, ...inline(text));
      made.style.textAlign = aligned[column];
      return made;
    };
    const row = (tag, texts) => el("tr", {}, ...head.map((_, column) => cell(tag, texts[column] ?? "", column)));
    return el(
      "div",
      { class: "table", tabindex: 0, role: "region", "aria-label": "Table" },
      el("table", {}, el("thead", {}, row("th", head)), el("tbody", {}, ...rows.map((texts) => row("td", texts)))),
    );
  },
};

const drawBlock = (block, depth) => DRAWERS[block.kind](block, depth);
const draw = (lines, depth) => parse(lines, depth).map((block) => drawBlock(block, depth));

function item([line, ...lines], depth) {
  const [task, mark] = TASK.exec(line) ?? [""];
  const box = task ? [mark === " " ? "☐ " : "☑ "] : [];
  const [first, ...rest] = parse([line.slice(task.length), ...lines], depth);
  if (first?.kind !== "paragraph") return [...box, ...(first ? [first, ...rest] : []).map((one) => drawBlock(one, depth))];
  return [...box, ...inline(first.text), ...rest.map((one) => drawBlock(one, depth))];
}

/** What may begin inside of a line: an escape, code, a link or an image, an address, a line break, an emphasis. */
const INLINE = new RegExp(
  [
    "\\\\(?<escaped>[!-/:-@[-`{-~])",
    "(?<ticks>`+)",
    "!?\\[(?<label>[^[\\]]*)\\]\\((?<target>(?:[^\\s()<>]|\\([^\\s()]*\\))*)(?: +\"[^\"]*\")?\\)",
    "<(?<address>(?:https?://|mailto:)[^\\s<>]*)>",
    "(?<bare>https?:\\/\\/[^\\s<>\"]+)",
    "(?<br><br *\\/?>)",
    "(?<run>\\*+|_+|~~)",
  ].join("|"),
  "g",
);
const ENDING = ".,:;!?'\")]}*_~`|"; // letters that are no part of an address at its end
const PROTOCOLS = ["http:", "https:", "mailto:"];
const TAGS = { 1: "em", 2: "strong" };

/** A link, or its text alone if it leads elsewhere than to the web. */
function link(target, nodes) {
  let url = null;
  try {
    url = new URL(target);
  } catch {
    // an address on this server, which has no such pages, or no address at all
  }
  if (!url || !PROTOCOLS.includes(url.protocol)) return nodes;
  return [el("a", { href: url.href, title: url.href, target: "_blank", rel: "noopener noreferrer nofollow" }, ...nodes)];
}

/** The nodes of a paragraph's text. `linked`: whether it stands in a link. */
function inline(text, linked = false) {
  if (text.length > LONGEST) return [text];
  const stack = [{ nodes: [] }]; // emphases that have begun, outermost first: {mark, size, nodes}
  const put = (...nodes) => stack.at(-1).nodes.push(...nodes);
  const fold = (depth) => {
    while (stack.length > depth) {
      const { mark, size, nodes } = stack.pop();
      put(mark.repeat(size), ...nodes);
    }
  };
  const wrap = (mark, size, nodes) => {
    if (mark === "~") return el("del", {}, ...nodes);
    return size === 3 ? el("em", {}, el("strong", {}, ...nodes)) : el(TAGS[size], {}, ...nodes);
  };
  /** End emphases of a mark. Returns how many of its letters have ended none. */
  const close = (mark, size) => {
    while (size > 0) {
      const at = stack.findLastIndex((one) => one.mark === mark);
      if (at < 0) return size;
      fold(at + 1);
      const begun = stack.pop();
      const used = Math.min(begun.size, size);
      const node = wrap(mark, used, begun.nodes);
      if (begun.size > used) stack.push({ mark, size: begun.size - used, nodes: [node] });
      else put(node);
      size -= used;
    }
    return size;
  };
  const emphasis = (run, at) => {
    const [before, after] = [text[at - 1] ?? " ", text[at + run.length] ?? " "];
    const inWord = run[0] === "_" && /[\p{L}\d]/u.test(before) && /[\p{L}\d]/u.test(after);
    if (run.length > 3 || inWord) return put(run);
    const left = /\s/.test(before) ? run.length : close(run[0], run.length);
    if (!left) return;
    if (/\s/.test(after) || stack.length > NESTED) put(run[0].repeat(left));
    else stack.push({ mark: run[0], size: left, nodes: [] });
  };
  const ticks = new Map(); // positions of runs of backticks, by the length of the run
  for (const { 0: run, index } of text.matchAll(/`+/g)) {
    if (!ticks.has(run.length)) ticks.set(run.length, []);
    ticks.get(run.length).push(index);
  }

  let at = 0;
  for (;;) {
    INLINE.lastIndex = at;
    const match = INLINE.exec(text);
    put(text.slice(at, match?.index));
    if (!match) break;
    const { escaped, ticks: fence, label, target, address, bare, br, run } = match.groups;
    at = match.index + match[0].length;
    if (escaped) put(escaped);
    else if (br) put(el("br"));
    else if (run) emphasis(run, match.index);
    else if (fence) {
      const end = ticks.get(fence.length).find((one) => one >= at);
      if (end === undefined) put(fence);
      else {
        put(el("code", {}, text.slice(at, end).replace(/^ (.*[^ ].*) $/s, "$1")));
        at = end + fence.length;
      }
    } else if (linked) put(match[0]);
    else if (label !== undefined) put(...link(target, inline(label || target, true)));
    else if (address) put(...link(address, [address]));
    else {
      let size = bare.length;
      while (ENDING.includes(bare[size - 1])) size -= 1;
      at = match.index + size;
      put(...link(bare.slice(0, size), [bare.slice(0, size)]));
    }
  }
  fold(1);
  return stack[0].nodes;
}

/** A text in Markdown that grows. What is before its last block is drawn once. */
export class Markdown {
  #from = 0; // where the text begins that may still change
  #drawn = 0; // length of the text that was drawn
  #nodes = []; // of the text that may still change
  #code = null; // the `CodeBlock` that is drawn last, if it is the only node

  constructor() {
    this.element = el("div", { class: "prose" });
  }

  /** Show a text that begins with the text before. `whole`: whether no more will come. */
  update(text, whole = false) {
    const [size, grown] = [text.length - this.#from, text.length - this.#drawn];
    if (!whole && size > LARGE && grown * PARTS < size) return;
    this.#drawn = text.length;
    const lines = text.slice(this.#from).split("\n");
    const blocks = parse(lines);
    const sure = blocks.findLastIndex(({ first }) => first < lines.length - UNSURE);
    const open = sure > 0 ? blocks.slice(sure) : blocks;
    if (this.#code && open === blocks && open.length === 1 && open[0].kind === "code" && open[0].language === this.#code.language) {
      this.#code.update(open[0].text);
      return;
    }
    for (const node of this.#nodes) node.remove();
    this.element.append(...blocks.slice(0, blocks.length - open.length).map((block) => drawBlock(block, 0)));
    this.#code = null;
    if (open.length === 1 && open[0].kind === "code") {
      this.#code = new CodeBlock(open[0].language);
      this.#code.update(open[0].text);
      this.#nodes = [this.#code.element];
    } else this.#nodes = open.map((block) => drawBlock(block, 0));
    this.element.append(...this.#nodes);
    if (open !== blocks) this.#from += lines.slice(0, open[0].first).reduce((sum, line) => sum + line.length + 1, 0);
  }
}
