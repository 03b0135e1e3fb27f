// packages: promptfoo
import { spawnSync } from "node:child_process";
import { mkdtempSync, readFileSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";

const { BASE_URL, MODEL } = process.env;
const folder = mkdtempSync(join(tmpdir(), "promptfoo-"));
const command = join(dirname(fileURLToPath(import.meta.url)), "node_modules", ".bin", "promptfoo");
const config = { apiBaseUrl: `${BASE_URL}/v1`, apiKey: "none", max_tokens: 60 };
const schema = {
  type: "object",
  properties: { name: { type: "string", maxLength: 40 }, age: { type: "integer", minimum: 0, maximum: 150 } },
  required: ["name", "age"],
  additionalProperties: false,
};
const form = { type: "json_schema", json_schema: { name: "person", schema, strict: true } };
const chat = { id: `openai:chat:${MODEL}`, label: "chat", config };
const json = { ...chat, label: "response_format", config: { ...config, response_format: form } };
const completion = { id: `openai:completion:${MODEL}`, label: "completion", config };
const embedding = { id: `openai:embedding:${MODEL}`, config };
const written = { type: "javascript", value: "output.length > 0" };
const valid = { type: "javascript", value: "Number.isInteger((typeof output === 'string' ? JSON.parse(output) : output).age)" };
const similar = { type: "similar", value: "Ann is 31 years old.", threshold: -1, provider: embedding };

function check(name, provider, assert, prompt = "Ann is 31 years old and lives in Rome. Who is she, and how old?") {
  const [file, out] = [join(folder, `${name}.json`), join(folder, `${name}-out.json`)];
  writeFileSync(file, JSON.stringify({ prompts: [prompt], providers: [provider], tests: [{ assert: [assert] }] }));
  const off = { PROMPTFOO_DISABLE_TELEMETRY: "1", PROMPTFOO_DISABLE_UPDATE: "1", PROMPTFOO_CONFIG_DIR: folder };
  const options = ["eval", "-c", file, "-o", out, "--no-cache", "--no-table", "--no-progress-bar", "--no-write"];
  const done = spawnSync(command, options, { env: { ...process.env, ...off }, encoding: "utf8" });
  try {
    const [result] = JSON.parse(readFileSync(out, "utf8")).results.results;
    const said = String(result.error ?? result.gradingResult?.reason).replaceAll("\n", " ").slice(0, 160);
    console.log(result.success ? `ok ${name}` : `failed ${name}: ${said}`);
  } catch (error) {
    console.log(`failed ${name}: ${(done.stderr || String(error)).replaceAll("\n", " ").slice(-160)}`);
  }
}

check("chat", chat, written);
check("completion", completion, written, "Once upon a time");
check("response_format", json, valid);
check("similar", chat, similar);
