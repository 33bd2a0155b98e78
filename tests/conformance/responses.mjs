// The package `openai` at /v1/responses: a text, a stream with a call, its output given back.
import OpenAI from "openai";
import { KEY, MODEL, call, check, serve, text } from "./helper.mjs";

const rules = [
  { has: ["START_TOOL_RESULT|>", "sunny"], say: text("It is sunny in Paris.") },
  { has: ["weather", "get_weather"], say: call("get_weather", { city: "Paris" }, "They want the weather.") },
  { has: ["Hello"], say: text("Hello to you.", "A greeting.") },
];
const tools = [{ type: "function", name: "get_weather", description: "The weather of a city", strict: false,
  parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } }];

export default async function () {
  const server = await serve(rules), client = new OpenAI({ baseURL: server.url, apiKey: KEY, maxRetries: 0 });
  const one = await client.responses.create({ model: MODEL, input: "Hello" });
  check("responses: a text", one.output_text === "Hello to you." && one.status === "completed" &&
    one.usage.output_tokens > 0, one);
  const next = await client.responses.create({ model: MODEL, input: "Hello again", previous_response_id: one.id });
  check("responses: one that follows", next.previous_response_id === one.id && next.output_text === "Hello to you.",
    next);

  const stream = client.responses.stream({ model: MODEL, input: "What is the weather?", tools, store: false });
  const kinds = new Set();
  for await (const event of stream) kinds.add(event.type);
  const asked = await stream.finalResponse(), made = asked.output.find(item => item.type === "function_call");
  check("responses: a call is streamed", made?.name === "get_weather" && JSON.parse(made.arguments).city === "Paris" &&
    ["response.created", "response.function_call_arguments.delta", "response.completed"].every(k => kinds.has(k)),
    [...kinds]);
  const told = await client.responses.create({ model: MODEL, tools, store: false, input: [
    { role: "user", content: "What is the weather?" }, ...asked.output,
    { type: "function_call_output", call_id: made.call_id, output: "{\"weather\": \"sunny\"}" }] });
  check("responses: with its output it is answered", told.output_text === "It is sunny in Paris.", told);
  check("responses: the server drains", await server.stop() === 0, server.log());
}
