/** Makes elements, and formats numbers. A child is always text or an element, never markup. */

const PAUSE = 40; // milliseconds between two drawings
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

/** Make an HTML element. Attributes that begin with "on" become listeners; false and null ones are left out. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** Make an SVG element. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

/**
 * Make a function that calls `draw` after a pause. More calls within the pause have no effect. A hidden tab does not
 * draw. The pause leaves the processor to the engine, which may run on the same machine while its speed is measured.
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

/** The text of a token with visible white space. */
export function visible(text) {
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "·") || "∅";
}

/** A number with its noun: "1 token", "2 tokens". */
export function count(number, thing, things = `${thing}s`) {
  return `${number.toLocaleString("en")} ${number === 1 ? thing : things}`;
}

/** A number with about three digits. */
export function rounded(value) {
  const digits = value >= 100 ? 0 : value >= 10 ? 1 : 2;
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}

/** A time in seconds or milliseconds. */
export function duration(seconds) {
  return seconds < 1 ? `${rounded(seconds * 1000)} ms` : `${rounded(seconds)} s`;
}

/** Let screen readers say a text. */
export function say(text) {
  document.getElementById("announcer").textContent = text;
}
