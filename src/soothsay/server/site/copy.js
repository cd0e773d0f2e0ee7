/** Buttons that copy a text. */

import { el, say } from "./dom.js";

const SHOWN = 1500; // milliseconds for which a button says what it has done

/** Copy a text to the clipboard. Returns whether that was possible. */
async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).then(() => true, () => false);
  const area = el("textarea", { class: "unseen", readonly: true }); // without TLS, browsers offer no other way
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}

/** A button that copies what `text()` returns. `name`: what it copies, for screen readers. */
export function copyButton(text, name) {
  const button = el("button", { type: "button", class: "quiet", "aria-label": `Copy ${name}` }, "Copy");
  let timer = null;
  button.addEventListener("click", async () => {
    const done = await copy(text());
    button.textContent = done ? "Copied" : "Not allowed";
    say(done ? `Copied ${name}` : "The browser does not let this page copy");
    button.focus();
    clearTimeout(timer);
    timer = setTimeout(() => (button.textContent = "Copy"), SHOWN);
  });
  return button;
}
