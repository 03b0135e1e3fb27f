// The server's API, as any client uses it: JSON, server-sent events, and errors in OpenAI's shape.

import { found, lost } from "./connection.js";
import { askForKey, key } from "./key.js";

/** What the server refused, in its own words. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** No answer, or one that broke off. */
export class Gone extends Error {
  constructor() {
    super("The server does not answer.");
  }
}

export async function get(path, values = {}) {
  const query = new URLSearchParams(Object.entries(values).filter(([, value]) => value !== "" && value !== null));
  return (await send(`${path}${query.size ? `?${query}` : ""}`)).json();
}

export async function text(path) {
  return (await send(path)).text();
}

export async function post(path, body, signal) {
  return (await send(path, posted(body, signal))).json();
}

export async function remove(path) {
  return (await send(path, { method: "DELETE" })).json();
}

/** The events of a stream, until the one that says "done". Throws Refused, Gone, AbortError. */
export async function* events(path, body, signal) {
  const response = await send(path, posted(body, signal));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await part(reader);
      if (done) throw broken();
      const whole = (rest + value).split("\n\n");
      rest = whole.pop();
      for (const line of whole.filter((line) => !line.startsWith(":"))) { // a comment keeps the connection open
        const event = JSON.parse(line.slice("data: ".length));
        if (event.error) throw new Refused(500, event.error.message);
        yield event;
        if (event.event === "done") return;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function posted(body, signal) {
  return { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" }, signal };
}

async function send(path, options = {}) {
  for (;;) {
    const used = key();
    const headers = { ...options.headers, ...(used ? { Authorization: `Bearer ${used}` } : {}) };
    let response;
    try {
      response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw broken();
    }
    found();
    if (response.ok) return response;
    const message = await said(response);
    if (response.status !== 401 || !(await askForKey(used))) throw new Refused(response.status, message);
  }
}

async function part(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw broken();
  }
}

function broken() {
  lost();
  return new Gone();
}

async function said(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The server answered with status ${response.status}.`;
  }
}
