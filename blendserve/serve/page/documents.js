// The Documents view: add files, follow their jobs, list and delete documents.

import { get, remove, upload } from "./api.js";
import { el, debounced } from "./dom.js";
import { count } from "./format.js";
import { followJob, followRunning } from "./jobs.js";
import { collectionField, pager } from "./parts.js";
import { formsOf } from "./files.js";

const PAGE = 25;

export function makeDocuments(root) {
  const input = el("input", { id: "files", type: "file", multiple: true });
  const zone = el(
    "div",
    { class: "drop" },
    el("label", { for: "files" }, "Drop files anywhere on this page, or choose files: text, Markdown, PDF, HTML, Office, CSV, JSON, code"),
    input,
  );
  const collection = collectionField("documents-collection", () => fill(0));
  const search = el("input", { id: "documents-search", type: "search", placeholder: "title or id" });
  const status = el("p", { class: "problem", role: "status" });
  const jobs = el("div", { class: "jobs" });
  const table = el("div", { class: "rows" });
  const pages = pager(PAGE, (offset) => fill(offset));
  const adding = el("section", { class: "card" }, el("h2", {}, "Add documents"), zone, jobs);
  let maxBytes = 0;
  let at = 0;
  let latest = 0;
  let mayWrite = true;

  root.append(
    adding,
    el(
      "section",
      { class: "card" },
      el("h2", {}, "Documents"),
      el("div", { class: "controls" }, el("div", { class: "field wide" }, el("label", { for: "documents-search" }, "Search"), search), collection.element),
      status,
      table,
      pages.element,
    ),
  );

  search.addEventListener("input", debounced(() => fill(0)));
  input.addEventListener("change", () => add([...input.files]).finally(() => (input.value = "")));
  for (const kind of ["dragenter", "dragover"]) {
    root.addEventListener(kind, (event) => {
      event.preventDefault();
      zone.classList.add("over");
    });
  }
  root.addEventListener("dragleave", (event) => root.contains(event.relatedTarget) || zone.classList.remove("over"));
  root.addEventListener("drop", (event) => {
    event.preventDefault();
    zone.classList.remove("over");
    if (mayWrite) add([...event.dataTransfer.files]);
  });

  async function add(files) {
    status.textContent = "";
    try {
      for (const form of formsOf(files, collection.value, maxBytes)) {
        const job = await upload("v1/documents", form);
        await followJob(jobs, job, () => fill(0));
      }
    } catch (error) {
      status.textContent = error.message;
    }
  }

  async function fill(offset) {
    const mine = (latest += 1);
    at = offset;
    try {
      const values = { collection: collection.value, search: search.value.trim(), offset, limit: PAGE };
      const found = await get("v1/documents", values);
      if (mine !== latest) return;
      table.replaceChildren(found.total ? rows(found) : el("p", { class: "muted" }, "No document matches."));
      pages.show(found.total, offset);
    } catch (error) {
      if (mine === latest) status.textContent = error.message;
    }
  }

  function rows({ collection: name, data }) {
    const heads = ["Document", "Id", "Passages", ""];
    return el(
      "table",
      {},
      el("caption", { class: "visually-hidden" }, "Documents"),
      el("thead", {}, el("tr", {}, ...heads.map((head) => (head ? el("th", { scope: "col" }, head) : el("td"))))),
      el(
        "tbody",
        {},
        ...data.map((document) =>
          el(
            "tr",
            { "data-id": document.id },
            el("th", { scope: "row" }, document.title || document.id),
            el("td", { "data-head": "Id" }, el("code", {}, document.id)),
            el("td", { "data-head": "Passages" }, count(document.passages)),
            el("td", { class: "actions" }, mayWrite && deleting(name, document)),
          ),
        ),
      ),
    );
  }

  /** A delete button that needs a second click, because deletion cannot be undone. */
  function deleting(name, document) {
    const button = el("button", { type: "button", class: "danger", "aria-label": `Delete: ${document.title || document.id}` }, "Delete");
    button.addEventListener("click", async () => {
      if (button.textContent === "Delete") {
        button.textContent = "Confirm delete";
        button.setAttribute("aria-label", `Confirm delete: ${document.title || document.id}`);
        button.addEventListener("blur", () => fill(at), { once: true });
        return;
      }
      try {
        await remove(`v1/documents/${encodeURIComponent(document.id)}?${new URLSearchParams({ collection: name })}`);
      } catch (error) {
        status.textContent = error.message;
      }
      fill(at);
    });
    return button;
  }

  return {
    settings({ collections, key, max_upload_bytes: bytes }) {
      collection.fill(collections);
      maxBytes = bytes;
      mayWrite = !key.read_only;
      adding.hidden = !mayWrite;
    },
    show() {
      fill(at);
      followRunning(jobs, () => fill(at)).catch((error) => (status.textContent = error.message));
    },
  };
}
