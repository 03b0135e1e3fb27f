// packages: openai zod
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { ASKED, MODEL, OPENAI, PERSON, check } from "./checks.mjs";

const client = new OpenAI({ baseURL: OPENAI, apiKey: "none" });
const chat = client.chat.completions;
const asked = { model: MODEL, messages: [{ role: "user", content: ASKED }] };
const tools = [{ type: "function", function: { name: "save", parameters: PERSON } }];
const named = { type: "function", function: { name: "save" } };
const Person = z.object({ name: z.string().max(40), age: z.number().int().min(0).max(150) });
const form = { type: "json_schema", json_schema: { name: "person", schema: PERSON, strict: true } };

async function text(stream) {
  let said = "";
  for await (const chunk of stream) said += chunk.choices[0].delta.content ?? "";
  return said;
}

async function called(choice) {
  const [call] = (await chat.create({ ...asked, tools, tool_choice: choice })).choices[0].message.tool_calls;
  return JSON.parse(call.function.arguments).age >= 0;
}

// The library calls the function, and sends the model what it returned.
async function ran() {
  let saved;
  const save = { name: "save", parameters: PERSON, parse: JSON.parse, function: (person) => (saved = person) };
  const options = { ...asked, tools: [{ type: "function", function: save }], tool_choice: named };
  await chat.runTools(options).done();
  return saved.age >= 0;
}

async function spoken() {
  const stream = client.responses.stream({ model: MODEL, input: ASKED, max_output_tokens: 30 });
  return (await stream.finalResponse()).output_text;
}

await check("models", async () => (await client.models.list()).data.length);
await check("chat", async () => (await chat.create(asked)).choices[0].message.content);
await check("stream", async () => text(await chat.create({ ...asked, stream: true })));
await check("json_schema", async () => JSON.parse((await chat.create({ ...asked, response_format: form })).choices[0].message.content).age >= 0);
await check("parse", async () => (await chat.parse({ ...asked, response_format: zodResponseFormat(Person, "person") })).choices[0].message.parsed);
await check("tool_choice required", () => called("required"));
await check("tool_choice named", () => called(named));
await check("runTools", ran);
await check("n", async () => (await chat.create({ ...asked, n: 3, max_tokens: 9 })).choices.length === 3);
await check("logprobs", async () => (await chat.create({ ...asked, logprobs: true, top_logprobs: 2, max_tokens: 3 })).choices[0].logprobs.content[0].top_logprobs.length === 2);
await check("completions", async () => (await client.completions.create({ model: MODEL, prompt: "Once upon a time", max_tokens: 9 })).choices[0].text);
await check("responses", async () => (await client.responses.create({ model: MODEL, input: ASKED, max_output_tokens: 30 })).output_text);
await check("responses, stream", spoken);
await check("responses, parse", async () => (await client.responses.parse({ model: MODEL, input: ASKED, text: { format: zodTextFormat(Person, "person") } })).output_parsed);
await check("embeddings", async () => (await client.embeddings.create({ model: MODEL, input: ["a", "b"] })).data[1].embedding.length > 0);
