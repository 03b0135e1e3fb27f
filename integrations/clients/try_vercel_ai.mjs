// packages: ai @ai-sdk/openai @ai-sdk/openai-compatible zod
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embed, generateObject, generateText, streamText } from "ai";
import { z } from "zod";

const { BASE_URL, MODEL } = process.env;
const baseURL = `${BASE_URL}/v1`;
const openai = createOpenAI({ baseURL, apiKey: "none" });
const compatible = createOpenAICompatible({ name: "local", baseURL, supportsStructuredOutputs: true });
const prompt = "Ann is 31 years old and lives in Rome. Who is she, and how old?";
const schema = z.object({ name: z.string().max(40), age: z.number().int().min(0).max(150) });

async function check(name, feature) {
  try {
    console.log((await feature()) ? `ok ${name}` : `failed ${name}: nothing returned`);
  } catch (error) {
    console.log(`failed ${name}: ${String(error.message).replaceAll("\n", " ").slice(0, 160)}`);
  }
}

await check("generateText, default", async () => (await generateText({ model: openai(MODEL), prompt })).text);
await check("streamText, default", async () => (await streamText({ model: openai(MODEL), prompt })).text);
await check("generateObject, default", async () => (await generateObject({ model: openai(MODEL), schema, prompt })).object);
await check("generateText, chat", async () => (await generateText({ model: openai.chat(MODEL), prompt })).text);
await check("generateObject, compatible", async () => (await generateObject({ model: compatible(MODEL), schema, prompt })).object);
await check("embed", async () => (await embed({ model: openai.embedding(MODEL), value: "a" })).embedding);
