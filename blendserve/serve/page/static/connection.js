// Whether the server answers; says so when it does not, and looks until it does again.

const AGAIN_MS = 1000;
const LOOK_MS = 5000;

/** Tells "back" when the server answers again. */
export const connection = new EventTarget();

let gone = false;

/** Nothing came from the server. */
export function lost() {
  if (gone) return;
  gone = true;
  document.body.classList.add("gone");
  say("The server does not answer. This page looks for it every second, and goes on by itself when it is back.");
  setTimeout(look, AGAIN_MS);
}

/** Something did. */
export function found() {
  if (!gone) return;
  gone = false;
  document.body.classList.remove("gone");
  say("The server is back.");
  setTimeout(() => gone || say(""), 4000);
  connection.dispatchEvent(new Event("back"));
}

/** Begin to look now and then, while somebody looks at the page. */
export function watch() {
  setInterval(() => gone || document.hidden || look(), LOOK_MS);
}

async function look() {
  try {
    await fetch("health", { cache: "no-store", credentials: "omit" });
    found();
  } catch {
    lost();
    if (gone) setTimeout(look, AGAIN_MS);
  }
}

function say(text) {
  document.getElementById("banner").textContent = text;
}
