// packages: @langchain/openai @langchain/core zod
import { ChatOpenAI, OpenAI, OpenAIEmbeddings } from "@langchain/openai";
import { tool } from "@langchain/core/tools";
import { z } from "zod";
import { ASKED, MODEL, OPENAI, check } from "./checks.mjs";

const own = { model: MODEL, apiKey: "none", configuration: { baseURL: OPENAI } };
const model = new ChatOpenAI(own);
const Person = z.object({ name: z.string().max(40), age: z.number().int().min(0).max(150) });
const save = tool(() => "saved", { name: "save", description: "Saves a person.", schema: Person });

async function text(stream) {
  let said = "";
  for await (const chunk of stream) said += chunk.content;
  return said;
}

async function structured(method) {
  const asked = ASKED + (method === "jsonMode" ? ' Answer in JSON: {"name": ..., "age": ...}' : "");
  return (await model.withStructuredOutput(Person, { name: "person", method }).invoke(asked)).age >= 0;
}

async function called(choice) {
  const [call] = (await model.bindTools([save], { tool_choice: choice }).invoke(ASKED)).tool_calls;
  return call.name === "save" && call.args.age >= 0;
}

await check("invoke", async () => (await model.invoke(ASKED)).content);
await check("stream", async () => text(await model.stream(ASKED)));
await check("batch", async () => (await model.batch([ASKED, ASKED])).length === 2);
for (const method of ["jsonSchema", "functionCalling", "jsonMode"]) {
  await check(`withStructuredOutput ${method}`, () => structured(method));
}
await check("tool_choice any", () => called("any"));
await check("tool_choice named", () => called("save"));
await check("responses api", async () => (await new ChatOpenAI({ ...own, useResponsesApi: true }).invoke(ASKED)).content);
await check("logprobs", async () => (await new ChatOpenAI({ ...own, logprobs: true, maxTokens: 5 }).invoke(ASKED)).response_metadata.logprobs.content.length);
await check("completions", async () => await new OpenAI({ ...own, maxTokens: 9 }).invoke("Once upon a time"));
await check("embeddings", async () => (await new OpenAIEmbeddings(own).embedDocuments(["a", "b"]))[1].length > 0);
