// The Store view: totals, and every passage with its KV, which can be pinned, cached and deleted.

import { get, post } from "./api.js";
import { el, debounced } from "./dom.js";
import { bytes, count, percent, several, times } from "./format.js";
import { followJob } from "./jobs.js";
import { collectionField, pager, tile } from "./parts.js";

const PAGE = 25;

export function makeStore(root) {
  const tiles = el("div", { class: "tiles" });
  const tiers = el("div");
  const search = el("input", { id: "store-search", type: "search", placeholder: "title, text or id" });
  const collection = collectionField("store-collection", () => fill(0));
  const warmAll = el("button", { type: "button" }, "Cache the collection");
  const jobs = el("div", { class: "jobs" });
  const status = el("p", { class: "problem", role: "status" });
  const table = el("div", { class: "rows" });
  const pages = pager(PAGE, (offset) => fill(offset));
  let at = 0;
  let latest = 0;
  let mayWrite = true;

  root.append(
    el("h2", { class: "visually-hidden" }, "Store"),
    tiles,
    tiers,
    el(
      "section",
      { class: "card" },
      el(
        "div",
        { class: "controls" },
        el("div", { class: "field wide" }, el("label", { for: "store-search" }, "Search the passages"), search),
        collection.element,
        el("div", { class: "actions" }, warmAll),
      ),
      jobs,
      status,
      table,
      pages.element,
    ),
  );
  search.addEventListener("input", debounced(() => fill(0)));
  warmAll.addEventListener("click", () => act(() => warm({ collection: collection.value })));

  async function warm(what) {
    await followJob(jobs, await post("v1/cache/warm", what), refresh);
  }

  async function act(what) {
    status.textContent = "";
    try {
      await what();
    } catch (error) {
      status.textContent = error.message;
    }
    await refresh();
  }

  async function refresh() {
    await Promise.all([sums(), fill(at)]);
  }

  async function sums() {
    try {
      const own = await get("v1/cache/stats");
      tiles.replaceChildren(...sumTiles(own));
      tiers.replaceChildren(...tierTable(own.store));
    } catch (error) {
      tiles.replaceChildren(el("p", { class: "problem" }, error.message));
    }
  }

  async function fill(offset) {
    const mine = (latest += 1);
    at = offset;
    try {
      const values = { collection: collection.value, search: search.value.trim(), offset, limit: PAGE };
      const found = await get("v1/cache/chunks", values);
      if (mine !== latest) return;
      table.replaceChildren(found.total ? rows(found) : el("p", { class: "muted" }, "No passage contains this text."));
      pages.show(found.total, offset);
    } catch (error) {
      if (mine === latest) status.textContent = error.message;
    }
  }

  function rows({ collection: name, data }) {
    const heads = ["Passage", "Tokens", "Stored", "Tier", ""];
    return el(
      "table",
      {},
      el("caption", { class: "visually-hidden" }, "Passages and their KV"),
      el("thead", {}, el("tr", {}, ...heads.map((head) => (head ? el("th", { scope: "col" }, head) : el("td"))))),
      el("tbody", {}, ...data.map((chunk) => row(name, chunk))),
    );
  }

  function row(name, chunk) {
    const one = { collection: name, ids: [chunk.id] };
    const button = (label, call, kind = "") =>
      el("button", { type: "button", class: kind, "aria-label": `${label}: ${chunk.title || chunk.id}`, onclick: () => act(call) }, label);
    const buttons = chunk.stored
      ? [
          mayWrite &&
            (chunk.pinned
              ? button("Unpin", () => post("v1/cache/unpin", one))
              : button("Pin", () => post("v1/cache/pin", one))),
          mayWrite && button("Delete KV", () => post("v1/cache/delete", one), "danger"),
        ]
      : [mayWrite && button("Cache", () => warm(one))];
    return el(
      "tr",
      { "data-id": chunk.id },
      el("th", { scope: "row" }, el("b", {}, chunk.title || chunk.id), el("span", { class: "excerpt" }, chunk.text)),
      el("td", { "data-head": "Tokens" }, count(chunk.tokens)),
      el("td", { "data-head": "Stored" }, chunk.stored ? stored(chunk) : el("span", { class: "muted" }, "not stored")),
      el("td", { "data-head": "Tier" }, chunk.tier ?? "–"),
      el("td", { class: "actions" }, ...buttons),
    );
  }

  return {
    settings({ collections, key }) {
      collection.fill(collections);
      mayWrite = !key.read_only;
      warmAll.hidden = !mayWrite;
    },
    show: refresh,
  };
}

function stored(chunk) {
  const coded = chunk.bytes < chunk.raw_bytes ? ` of ${bytes(chunk.raw_bytes)} decoded` : "";
  return el("span", {}, bytes(chunk.bytes) + coded, chunk.pinned && el("span", { class: "badge" }, "pinned"));
}

function sumTiles(own) {
  const asked = own.hits + own.misses;
  const whole = own.store;
  return [
    tile("Chunks", count(own.chunks), `${several(own.tokens, "token")}, ${count(own.pins)} pinned`),
    tile("Bytes", bytes(own.bytes), own.bytes < own.raw_bytes ? `${bytes(own.raw_bytes)} decoded, compressed ${times(own.raw_bytes / own.bytes)}` : "not compressed"),
    tile("Hit rate", asked ? percent(own.hits / asked) : "–", `${count(own.hits)} of ${several(asked, "look-up")}${own.corrupt ? `, ${count(own.corrupt)} damaged` : ""}`, asked ? own.hits / asked : null),
    whole && tile("Capacity used", percent(whole.bytes / whole.cap_bytes), `${bytes(whole.bytes)} of ${bytes(whole.cap_bytes)}, all API keys`, whole.bytes / whole.cap_bytes),
    whole && tile("Evicted", count(whole.evictions), `${count(whole.admissions_refused)} refused`),
  ];
}

/** The memory tiers and the remote store, if there are any. */
function tierTable(whole) {
  const names = Object.keys(whole ?? {}).filter((name) => name.endsWith("_cap_bytes") && name !== "cap_bytes").map((name) => name.slice(0, -"_cap_bytes".length));
  const tiles = names.map((name) =>
    tile(`Tier ${name}`, bytes(whole[`${name}_bytes`]), `${several(whole[`${name}_chunks`], "chunk")} of ${bytes(whole[`${name}_cap_bytes`])}, ${several(whole[`${name}_hits`], "hit")}`),
  );
  if (whole && "remote_hits" in whole) {
    tiles.push(tile("Remote store", several(whole.remote_hits, "hit"), `${count(whole.remote_misses)} misses, ${count(whole.remote_failures)} failures, ${count(whole.remote_written)} written`));
  }
  return tiles.length ? [el("div", { class: "tiles" }, ...tiles)] : [];
}
