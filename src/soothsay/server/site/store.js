/** Keeps values in the browser, if it lets the page. What is kept may be old, or another page's: it is to be checked. */

const PREFIX = "soothsay."; // other pages of the same host may keep things too

/** What is kept under a name; null if nothing is, or if it cannot be read. */
export function recall(name) {
  try {
    return JSON.parse(localStorage.getItem(PREFIX + name));
  } catch {
    return null;
  }
}

/** Keep a value. Returns whether there was room. */
export function remember(name, value) {
  try {
    localStorage.setItem(PREFIX + name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

/** Keep the value of a name no longer. */
export function forget(name) {
  try {
    localStorage.removeItem(PREFIX + name);
  } catch {
    // nothing was kept
  }
}

/** The names that begin with `begin`, under which something is kept, and the length of what is. */
export function kept(begin) {
  try {
    return Object.entries(localStorage)
      .filter(([name]) => name.startsWith(PREFIX + begin))
      .map(([name, text]) => ({ name: name.slice(PREFIX.length), length: text.length }));
  } catch {
    return [];
  }
}
