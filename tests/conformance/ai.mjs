// The packages `ai` and `@ai-sdk/openai-compatible`: a text, and steps with a tool, whole and streamed.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { KEY, MODEL, call, check, serve, text } from "./helper.mjs";

const rules = [
  { has: ["START_TOOL_RESULT|>", "42"], say: text("The sum is 42.", "They are added.") },
  { has: ["17 and 25"], say: call("add", { a: 17, b: 25 }, "I can add.") },
  { has: ["Hello"], say: text("Hello to you.", "A greeting.") },
];

export default async function () {
  const server = await serve(rules);
  const model = createOpenAICompatible({ name: "nmk", baseURL: server.url, apiKey: KEY, includeUsage: true })(MODEL);
  const one = await generateText({ model, prompt: "Hello" });
  check("ai: a text", one.text === "Hello to you." && one.finishReason === "stop", one.text);
  check("ai: its reasoning and usage", one.reasoningText === "A greeting." && one.usage.outputTokens > 0,
    [one.reasoningText, one.usage]);

  const asked = [];
  const add = tool({ description: "Adds two numbers", inputSchema: z.object({ a: z.number(), b: z.number() }),
    execute: async ({ a, b }) => (asked.push([a, b]), { sum: a + b }) });
  const steps = { model, prompt: "Add 17 and 25", tools: { add }, stopWhen: stepCountIs(4) };
  const whole = await generateText(steps);
  check("ai: a tool", whole.text === "The sum is 42." && whole.steps.length === 2 && asked.join() === "17,25",
    whole.steps);
  const streamed = streamText(steps), kinds = new Set();
  for await (const event of streamed.fullStream) kinds.add(event.type);
  check("ai: a tool, streamed", await streamed.text === "The sum is 42." && asked.length === 2 &&
    ["reasoning-delta", "tool-call", "tool-result", "text-delta", "finish"].every(k => kinds.has(k)), [...kinds]);
  check("ai: usage of a stream", (await streamed.totalUsage).outputTokens > 0, await streamed.totalUsage);
  check("ai: the server drains", await server.stop() === 0, server.log());
}
