/** Making elements. What is given as a child is always text or an element, never markup. */

const PAUSE = 40; // milliseconds
const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

/** An element of HTML; attributes that begin with "on" are listeners, false and null ones are left out. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** An element of SVG. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/**
 * Calls `draw` soon, once, however often it is asked to, and in a tab that nobody sees not at all. The pause leaves the
 * processor to the engine, which may be on the same machine: a speed is measured meanwhile.
 */
export function onPaint(draw) {
  let due = false;
  const paint = () => {
    due = false;
    draw();
  };
  return () => {
    if (due) return;
    due = true;
    setTimeout(() => requestAnimationFrame(paint), PAUSE);
  };
}

/** A token with its white space made visible. */
export function visible(text) {
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "·") || "∅";
}

/** "1 token", "2 tokens". */
export function count(number, thing, things = `${thing}s`) {
  return `${number.toLocaleString("en")} ${number === 1 ? thing : things}`;
}

/** A number with as many digits as are worth reading. */
export function rounded(value) {
  const digits = value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}

/** Seconds, in a unit that fits. */
export function duration(seconds) {
  return seconds < 1 ? `${rounded(seconds * 1000)} ms` : `${rounded(seconds)} s`;
}
