// packages: promptfoo
import { spawnSync } from "node:child_process";
import { mkdtempSync, readFileSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { ASKED, MODEL, OPENAI, PERSON, check } from "./checks.mjs";

const folder = mkdtempSync(join(tmpdir(), "promptfoo-"));
const command = join(dirname(fileURLToPath(import.meta.url)), "node_modules", ".bin", "promptfoo");
const config = { apiBaseUrl: OPENAI, apiKey: "none", max_tokens: 60 };
const form = { type: "json_schema", json_schema: { name: "person", schema: PERSON, strict: true } };
const chat = { id: `openai:chat:${MODEL}`, label: "chat", config };
const json = { ...chat, label: "response_format", config: { ...config, response_format: form } };
const completion = { id: `openai:completion:${MODEL}`, label: "completion", config };
const embedding = { id: `openai:embedding:${MODEL}`, config };
const written = { type: "javascript", value: "output.length > 0" };
const valid = { type: "javascript", value: "Number.isInteger((typeof output === 'string' ? JSON.parse(output) : output).age)" };
const similar = { type: "similar", value: "Ann is 31 years old.", threshold: -1, provider: embedding };

// Whether an answer of the provider passes an assertion.
function evaluated(name, provider, assert, prompt = ASKED) {
  const [file, out] = [join(folder, `${name}.json`), join(folder, `${name}-out.json`)];
  writeFileSync(file, JSON.stringify({ prompts: [prompt], providers: [provider], tests: [{ assert: [assert] }] }));
  const off = { PROMPTFOO_DISABLE_TELEMETRY: "1", PROMPTFOO_DISABLE_UPDATE: "1", PROMPTFOO_CONFIG_DIR: folder };
  const options = ["eval", "-c", file, "-o", out, "--no-cache", "--no-table", "--no-progress-bar", "--no-write"];
  const done = spawnSync(command, options, { env: { ...process.env, ...off }, encoding: "utf8" });
  if (done.stderr) console.error(done.stderr);
  const [result] = JSON.parse(readFileSync(out, "utf8")).results.results;
  if (!result.success) throw new Error(result.error ?? result.gradingResult?.reason);
  return true;
}

await check("chat", () => evaluated("chat", chat, written));
await check("completion", () => evaluated("completion", completion, written, "Once upon a time"));
await check("response_format", () => evaluated("response_format", json, valid));
await check("similar", () => evaluated("similar", chat, similar));
