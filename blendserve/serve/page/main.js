// The tabs, and the server's settings, which all views get.

import { connection, forgetKey, get, keepKeyOfUrl, showForgetKey, watchConnection } from "./api.js";
import { makeAsk } from "./ask.js";
import { makeDocuments } from "./documents.js";
import { makeLoad } from "./load.js";
import { makeStore } from "./store.js";

const MAKERS = { ask: makeAsk, store: makeStore, documents: makeDocuments, load: makeLoad };
const panels = Object.fromEntries(
  Object.entries(MAKERS).map(([name, make]) => [name, make(document.getElementById(name))]),
);
const tabs = [...document.querySelectorAll("[role=tab]")];
let current = "ask";

/** Show one panel and hide the current one. */
function open(name) {
  if (!(name in panels)) name = "ask";
  panels[current].hide?.();
  current = name;
  for (const tab of tabs) {
    const chosen = tab.getAttribute("aria-controls") === name;
    tab.setAttribute("aria-selected", String(chosen));
    tab.tabIndex = chosen ? 0 : -1;
    document.getElementById(tab.getAttribute("aria-controls")).hidden = !chosen;
  }
  panels[name].show?.();
}

/** Set the URL by the history API: the "back" button works, and the focus stays. */
function go(tab) {
  const name = tab.getAttribute("aria-controls");
  if (name !== current) history.pushState(null, "", `#${name}`);
  open(name);
}

for (const [n, tab] of tabs.entries()) {
  tab.addEventListener("click", () => {
    go(tab);
  });
  tab.addEventListener("keydown", (event) => {
    const to = { ArrowRight: n + 1, ArrowLeft: n - 1 + tabs.length, Home: 0, End: tabs.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const next = tabs[to % tabs.length];
    next.focus();
    go(next);
  });
}
addEventListener("popstate", () => open(location.hash.slice(1)));
document.getElementById("forget-key").addEventListener("click", () => {
  forgetKey();
  location.reload();
});
connection.addEventListener("back", start);

async function start() {
  try {
    const settings = await get("v1/rag/settings");
    document.getElementById("about").textContent = `${settings.model} · ${settings.version}`;
    for (const panel of Object.values(panels)) panel.settings(settings);
    open(location.hash.slice(1) || current);
  } catch (error) {
    document.getElementById("about").textContent = error.message;
  }
}

keepKeyOfUrl();
showForgetKey();
watchConnection();
start();
