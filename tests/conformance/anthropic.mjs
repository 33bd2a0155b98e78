// The package `@anthropic-ai/sdk` at /v1/messages: a text, thinking, a stream with a tool, errors.
import Anthropic from "@anthropic-ai/sdk";
import { KEY, MODEL, call, check, serve, text } from "./helper.mjs";

const rules = [
  { has: ["START_TOOL_RESULT|>", "sunny"], say: text("It is sunny in Paris.") },
  { has: ["weather", "get_weather"], say: call("get_weather", { city: "Paris" }, "They want the weather.") },
  { has: ["Hello"], say: text("Hello to you.", "A greeting.") },
];
const tools = [{ name: "get_weather", description: "The weather of a city",
  input_schema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } }];
const thinking = { type: "enabled", budget_tokens: 1024 };

export default async function () {
  const server = await serve(rules);
  const client = new Anthropic({ baseURL: new URL(server.url).origin, apiKey: KEY, maxRetries: 0 });
  const ask = content => ({ model: MODEL, max_tokens: 2048, messages: [{ role: "user", content }] });
  const one = await client.messages.create({ ...ask("Hello"), thinking });
  check("anthropic: thinking and a text", one.content.map(block => block.type).join() === "thinking,text" &&
    one.content[0].thinking === "A greeting." && one.content[1].text === "Hello to you." &&
    one.stop_reason === "end_turn", one);
  check("anthropic: its usage", one.usage.input_tokens > 0 && one.usage.output_tokens > 0, one.usage);
  const counted = await client.messages.countTokens({ model: MODEL, messages: ask("Hello").messages });
  check("anthropic: tokens are counted", counted.input_tokens > 0, counted);

  const question = { ...ask("What is the weather?"), tools, thinking };
  const stream = client.messages.stream(question), kinds = new Set();
  for await (const event of stream) kinds.add(event.type);
  const asked = await stream.finalMessage(), made = asked.content.find(block => block.type === "tool_use");
  check("anthropic: a tool is used, streamed", made?.name === "get_weather" && made.input.city === "Paris" &&
    asked.stop_reason === "tool_use" && kinds.has("message_start") && kinds.has("message_stop"), asked);
  const told = await client.messages.create({ ...question, messages: [...question.messages,
    { role: "assistant", content: asked.content },
    { role: "user", content: [{ type: "tool_result", tool_use_id: made.id, content: "sunny" }] }] });
  check("anthropic: its result is answered", told.content.at(-1).text === "It is sunny in Paris.", told);
  const wrong = await new Anthropic({ baseURL: new URL(server.url).origin, apiKey: "no", maxRetries: 0 })
    .messages.create(ask("Hello")).catch(e => e);
  check("anthropic: a wrong key", wrong instanceof Anthropic.AuthenticationError, wrong);
  const models = await client.models.list(), model = await client.models.retrieve(MODEL);
  check("anthropic: models", models.data.some(m => m.id === MODEL && m.type === "model") && model.id === MODEL &&
    Date.parse(model.created_at) > 0, models);
  check("anthropic: the server drains", await server.stop() === 0, server.log());
}
