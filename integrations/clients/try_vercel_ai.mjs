// packages: ai @ai-sdk/openai @ai-sdk/openai-compatible zod
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embed, generateObject, generateText, streamText } from "ai";
import { z } from "zod";
import { ASKED, MODEL, OPENAI, check } from "./checks.mjs";

const openai = createOpenAI({ baseURL: OPENAI, apiKey: "none" });
const compatible = createOpenAICompatible({ name: "local", baseURL: OPENAI, supportsStructuredOutputs: true });
const prompt = ASKED;
const schema = z.object({ name: z.string().max(40), age: z.number().int().min(0).max(150) });

await check("generateText, default", async () => (await generateText({ model: openai(MODEL), prompt })).text);
await check("streamText, default", async () => (await streamText({ model: openai(MODEL), prompt })).text);
await check("generateObject, default", async () => (await generateObject({ model: openai(MODEL), schema, prompt })).object);
await check("generateText, chat", async () => (await generateText({ model: openai.chat(MODEL), prompt })).text);
await check("generateObject, compatible", async () => (await generateObject({ model: compatible(MODEL), schema, prompt })).object);
await check("embed", async () => (await embed({ model: openai.embedding(MODEL), value: "a" })).embedding);
