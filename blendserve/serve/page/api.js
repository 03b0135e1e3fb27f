// The server's API: JSON, server-sent events, the API key of this tab, and whether the server answers.

const KEY_ITEM = "blendserve-key";
const RETRY_MS = 1000;
const CHECK_MS = 5000;

/** An error that the server returned, with its message. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** No response, or one that broke off. */
export class ConnectionLost extends Error {
  constructor() {
    super("The server does not answer.");
  }
}

// Requests

export async function get(path, values = {}) {
  const query = new URLSearchParams(Object.entries(values).filter(([, value]) => value !== "" && value !== null));
  return (await send(`${path}${query.size ? `?${query}` : ""}`)).json();
}

export async function text(path) {
  return (await send(path)).text();
}

export async function post(path, body, signal) {
  return (await send(path, postOptions(body, signal))).json();
}

/** Send a form of files. */
export async function upload(path, form) {
  return (await send(path, { method: "POST", body: form })).json();
}

export async function remove(path) {
  return (await send(path, { method: "DELETE" })).json();
}

/** The events of a stream until the event "done". Throws ApiError, ConnectionLost, AbortError. */
export async function* events(path, body, signal) {
  const response = await send(path, postOptions(body, signal));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await connected(reader.read());
      if (done) throw connectionLost();
      const complete = (rest + value).split("\n\n");
      rest = complete.pop();
      for (const line of complete.filter((line) => !line.startsWith(":"))) { // a comment keeps the connection open
        const event = JSON.parse(line.slice("data: ".length));
        if (event.error) throw new ApiError(500, event.error.message);
        yield event;
        if (event.event === "done") return;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function postOptions(body, signal) {
  return { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" }, signal };
}

/** A successful response. After status 401, ask for an API key and send the request again. */
async function send(path, options = {}) {
  for (;;) {
    const key = apiKey();
    const headers = { ...options.headers, ...(key ? { Authorization: `Bearer ${key}` } : {}) };
    const response = await connected(fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" }));
    reconnected();
    if (response.ok) return response;
    const message = await errorMessage(response);
    if (response.status !== 401 || !(await askForKey(key))) throw new ApiError(response.status, message);
  }
}

/** The result of a network call; ConnectionLost if it fails and was not aborted. */
async function connected(call) {
  try {
    return await call;
  } catch (error) {
    throw error.name === "AbortError" ? error : connectionLost();
  }
}

function connectionLost() {
  disconnected();
  return new ConnectionLost();
}

async function errorMessage(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered with status ${response.status}.`;
  }
}

// Connection

/** Dispatches "back" when the server answers again. */
export const connection = new EventTarget();

let isDown = false;

/** Check every few seconds, while the page is visible, whether the server answers. */
export function watchConnection() {
  setInterval(() => isDown || document.hidden || check(), CHECK_MS);
}

function disconnected() {
  if (isDown) return;
  isDown = true;
  document.body.classList.add("gone");
  showBanner("The server does not answer. This page retries every second.");
  setTimeout(check, RETRY_MS);
}

function reconnected() {
  if (!isDown) return;
  isDown = false;
  document.body.classList.remove("gone");
  showBanner("The server is back.");
  setTimeout(() => isDown || showBanner(""), 4000);
  connection.dispatchEvent(new Event("back"));
}

async function check() {
  try {
    await fetch("health", { cache: "no-store", credentials: "omit" });
    reconnected();
  } catch {
    disconnected();
    if (isDown) setTimeout(check, RETRY_MS);
  }
}

function showBanner(message) {
  document.getElementById("banner").textContent = message;
}

// API key, kept in this tab only

let asking = null;

/** Take the key out of a URL that ends in #key=KEY: it shall not stay in the history. */
export function keepKeyOfUrl() {
  const [name, key] = location.hash.slice(1).split("=");
  if (name !== "key" || !key) return;
  sessionStorage.setItem(KEY_ITEM, key);
  history.replaceState(null, "", location.pathname);
}

export function forgetKey() {
  sessionStorage.removeItem(KEY_ITEM);
  showForgetKey();
}

/** Show the button that forgets the key, if there is a key. */
export function showForgetKey() {
  document.getElementById("forget-key").hidden = !apiKey();
}

function apiKey() {
  return sessionStorage.getItem(KEY_ITEM) ?? "";
}

/** Ask the user for a key, once for all waiting requests -> whether there is a new one. `rejected`: the key that failed. */
function askForKey(rejected) {
  if (apiKey() !== rejected) return Promise.resolve(true); // entered for another request
  asking ??= openKeyDialog(rejected).finally(() => (asking = null));
  return asking;
}

function openKeyDialog(rejected) {
  const dialog = document.getElementById("key-dialog");
  const input = document.getElementById("key");
  document.getElementById("key-problem").textContent = rejected ? "This API key is not valid." : "";
  input.value = "";
  dialog.returnValue = "";
  dialog.showModal();
  input.focus();
  return new Promise((resolve) => {
    const onClose = () => {
      const entered = dialog.returnValue === "cancel" ? "" : input.value.trim();
      input.value = "";
      if (entered) sessionStorage.setItem(KEY_ITEM, entered);
      showForgetKey();
      resolve(entered !== "");
    };
    dialog.addEventListener("close", onClose, { once: true });
  });
}
