// packages: @continuedev/openai-adapters @continuedev/cli
// Of Continue, npm has the part that talks to models and the agent `cn`. Its extensions of editors are not there: their
// autocompletion is asked here as the extension asks it, by the same adapter, with the tokens and stops of its template.
import { spawnSync } from "node:child_process";
import { mkdtempSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { constructLlmApi } from "@continuedev/openai-adapters";
import { ASKED, MODEL, OPENAI, PERSON, check } from "./checks.mjs";

const api = constructLlmApi({ provider: "openai", apiKey: "none", apiBase: `${OPENAI}/` });
const { signal } = new AbortController();
const asked = { model: MODEL, messages: [{ role: "user", content: ASKED }] };
const tools = [{ type: "function", function: { name: "save", parameters: PERSON } }];
const FIM = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"];
const STOPS = ["<|endoftext|>", ...FIM, "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|im_start|>", "<|im_end|>", "/src/", "#- coding: utf-8", "```"];

async function collected(stream, textOf) {
  let said = "";
  for await (const chunk of stream) said += textOf(chunk) ?? "";
  return said;
}

function autocompletion() {
  const prompt = `${FIM[0]}def add(a, b):\n    return ${FIM[1]}\n${FIM[2]}`;
  const body = { model: MODEL, prompt, max_tokens: 9, temperature: 0.01, stop: STOPS, stream: true };
  return collected(api.completionStream(body, signal), (chunk) => chunk.choices[0].text);
}

// The agent without a terminal, in a home of its own.
function agent() {
  const folder = mkdtempSync(join(tmpdir(), "continue-"));
  const config = join(folder, "config.yaml");
  const model = { name: "local", provider: "openai", model: MODEL, apiBase: OPENAI, apiKey: "none", roles: ["chat"] };
  writeFileSync(config, JSON.stringify({ name: "local", version: "1.0.0", schema: "v1", models: [model] })); // JSON is YAML
  const command = join(dirname(fileURLToPath(import.meta.url)), "node_modules", ".bin", "cn");
  const env = { ...process.env, HOME: folder, CONTINUE_GLOBAL_DIR: folder, FORCE_NO_TTY: "true" };
  const done = spawnSync(command, ["-p", ASKED, "--config", config], { env, cwd: folder, encoding: "utf8" });
  if (done.status !== 0) throw new Error((done.stdout + done.stderr).slice(-300));
  return done.stdout.trim();
}

await check("models", async () => (await api.list()).length);
await check("chat", async () => (await api.chatCompletionNonStream(asked, signal)).choices[0].message.content);
await check("chat, streamed", () => collected(api.chatCompletionStream({ ...asked, stream: true }, signal), (chunk) => chunk.choices[0]?.delta.content));
await check("tool_choice required", async () => (await api.chatCompletionNonStream({ ...asked, tools, tool_choice: "required" }, signal)).choices[0].message.tool_calls);
await check("autocompletion, 12 stops", autocompletion);
await check("embeddings", async () => (await api.embed({ model: MODEL, input: ["a"] })).data[0].embedding.length);
await check("cn, the agent", agent);
