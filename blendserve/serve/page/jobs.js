// Jobs of the server, polled until they end.

import { get } from "./api.js";
import { el } from "./dom.js";
import { several } from "./format.js";

const POLL_MS = 400;

const followed = new Set();

/** Show the jobs that were started before this page, or elsewhere. */
export async function followRunning(root, done) {
  const { data } = await get("v1/jobs");
  const running = data.filter((job) => job.state === "running" && !followed.has(job.id));
  await Promise.all(running.map((job) => followJob(root, job, done)));
}

/** Show a job's progress in `root`; `done` is called at its end. Throws the errors of a request. */
export async function followJob(root, job, done) {
  followed.add(job.id);
  const bar = el("progress", { max: "1", "aria-label": job.kind });
  const said = el("span", { role: "status" });
  const line = el("div", { class: "job" }, el("b", {}, job.kind), bar, said);
  root.prepend(line);
  for (;;) {
    show(bar, said, job);
    if (job.state !== "running") break;
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    job = await get(`v1/jobs/${job.id}`);
  }
  line.classList.add(job.state);
  const unread = job.files.filter((file) => file.state !== "read");
  if (unread.length) line.append(el("ul", {}, ...unread.map((file) => el("li", {}, `${file.name}: ${file.note}`))));
  await done(job);
}

/** Documents are split and embedded first. Then the KV of their chunks is computed. */
function show(bar, said, job) {
  const parts = [[job.documents, job.total_documents], [job.computed, job.chunks]].filter(([, all]) => all);
  if (job.state === "done") bar.value = 1;
  else if (parts.length) bar.value = parts.reduce((sum, [n, all]) => sum + n / all, 0) / (job.total_documents ? 2 : 1);
  const documents = job.total_documents ? `${job.documents} of ${several(job.total_documents, "document")} added` : "";
  const chunks = job.chunks ? `KV of ${job.computed} of ${several(job.chunks, "chunk")}` : "";
  said.textContent = job.state === "failed" ? `failed: ${job.error}` : [documents, chunks].filter(Boolean).join(", ");
}
