/** Connects the parts of the page. */

import { Api } from "./api.js";
import { Chart, CHARTS } from "./charts.js";
import { Chats } from "./chats.js";
import { Conversation, isSend } from "./conversation.js";
import { el } from "./dom.js";
import { History, parse } from "./metrics.js";
import { Palette } from "./palette.js";
import { Pulse } from "./pulse.js";
import { Settings } from "./settings.js";
import { recall, remember } from "./store.js";
import { Tip } from "./tip.js";
import { TreePanel } from "./tree.js";

const EXAMPLES = [
  "Can you explain why the sky is blue?",
  "Write a Python function that adds up a list of numbers.",
  "I would like to book a table at a restaurant for tonight.",
];

const REMEMBERED = 15; // seconds of readings to keep: more than any rate or mean needs

const get = (id) => document.getElementById(id);

const api = new Api();
const palette = new Palette();
const settings = new Settings(get("settings"));
const tip = new Tip(get("tip"));
const message = get("message");

const tree = new TreePanel(
  {
    drawing: get("tree-drawing"),
    caption: get("tree-caption"),
    empty: get("tree-empty"),
    slider: get("tree-slider"),
    position: get("tree-position"),
    back: get("tree-back"),
    on: get("tree-on"),
    replay: get("tree-replay"),
  },
  palette,
  (answer, step) => conversation.mark(answer, step),
);

const chats = new Chats(
  { list: get("chats"), title: get("chat-title"), empty: get("chat-empty"), clear: get("forget") },
  { open: (id) => conversation.open(id), gone: (ids) => conversation.drop(ids) },
);

const conversation = new Conversation(
  { list: get("turns"), welcome: get("welcome"), system: get("system") },
  { api, palette, tree, chats, read: () => settings.read() },
  {
    busy,
    failed: (error) => error.code === "invalid_api_key" && unlock(),
    focus: () => message.focus(),
    point: (element) => (element ? tip.show(element) : tip.hide()),
  },
);

const history = new History(REMEMBERED);
const charts = CHARTS.map((spec) => new Chart(spec, palette));
get("chart-list").append(...charts.map((chart) => chart.element));

const pulse = new Pulse(api, {
  state: showState,
  found: loadModel,
  reading: (at, text) => {
    history.push(at, parse(text));
    for (const chart of charts) chart.push(at, history);
  },
});

function busy(whether) {
  const hadFocus = document.activeElement === get("stop");
  get("send").hidden = whether;
  get("stop").hidden = !whether;
  if (hadFocus) message.focus();
}

function send(text) {
  if (conversation.busy || !text.trim() || !settings.read()) return;
  message.value = "";
  conversation.send(text.trim());
}

function unlock() {
  if (!get("key-form").hidden) return;
  get("key-form").hidden = false;
  get("key").focus();
}

/** Load the description of the server's model, and show it. */
async function loadModel() {
  const card = await api.model();
  conversation.model = card.id;
  get("model").textContent = card.id;
  document.title = `${card.id} · soothsay`;
  settings.offer(card);
  get("key-form").hidden = true;
}

function showState(state, text) {
  const status = get("status");
  if (status.textContent === text) return;
  status.textContent = text;
  status.dataset.state = state;
  if (state === "locked") unlock();
}

get("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  send(message.value);
});
message.addEventListener("keydown", (event) => {
  if (!isSend(event)) return;
  event.preventDefault();
  send(message.value);
});
document.addEventListener("keydown", ({ key }) => key === "Escape" && conversation.stop());
get("stop").addEventListener("click", () => conversation.stop());
get("new").addEventListener("click", () => {
  conversation.clear();
  message.focus();
});
addEventListener("pagehide", () => conversation.keep());
get("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  api.key = get("key").value.trim();
  get("key").value = "";
  pulse.ask();
});

const systemShort = () => (get("system-short").textContent = get("system").value.trim() || "none");
const system = recall("system");
if (typeof system === "string") get("system").value = system;
get("system").addEventListener("input", () => {
  remember("system", get("system").value);
  systemShort();
});
systemShort();

get("examples").append(
  ...EXAMPLES.map((text) => el("li", {}, el("button", { type: "button", onclick: () => send(text) }, text))),
);

const dark = matchMedia("(prefers-color-scheme: dark)");
const root = document.documentElement;
const theme = () => root.dataset.theme ?? (dark.matches ? "dark" : "light");
const offerTheme = () => {
  const other = theme() === "dark" ? "Light" : "Dark";
  get("theme").textContent = `◐ ${other}`;
  get("theme").setAttribute("aria-label", `${other} colours`);
};
get("theme").addEventListener("click", () => {
  root.dataset.theme = theme() === "dark" ? "light" : "dark";
  remember("theme", root.dataset.theme);
  offerTheme();
});
dark.addEventListener("change", offerTheme);
offerTheme();

get("settings-part").open = !matchMedia("(max-width: 620px)").matches; // there is no room for them beside the answers
pulse.ask();
message.focus();
