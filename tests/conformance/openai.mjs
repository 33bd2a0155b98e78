// The package `openai`: chats whole and streamed, tool calls to their end, what is wrong.
import OpenAI from "openai";
import { KEY, MODEL, call, check, serve, text } from "./helper.mjs";

const tools = [{ type: "function", function: { name: "get_weather", description: "The weather of a city",
  parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } } }];
const rules = [
  { has: ["START_TOOL_RESULT|>", "sunny"], say: text("It is sunny in Paris.") },
  { has: ["weather", "get_weather"], say: call("get_weather", { city: "Paris" }, "They want the weather.") },
  { has: ["Count"], say: text(Array.from({ length: 400 }, (_, i) => i).join(" ")) },
  { has: ["Hello"], say: text("Hello to you: h\u00e9 \u{1f600}.", "A greeting.") },
];

export default async function () {
  const server = await serve(rules), client = new OpenAI({ baseURL: server.url, apiKey: KEY, maxRetries: 0 });
  const ask = content => [{ role: "user", content }];

  const models = await client.models.list();
  check("openai: models", models.data[0]?.id === MODEL, models.data);
  const whole = await client.chat.completions.create({ model: MODEL, messages: ask("Hello") });
  check("openai: a chat", whole.choices[0].message.content === "Hello to you: h\u00e9 \u{1f600}." &&
    whole.choices[0].message.reasoning_content === "A greeting." && whole.choices[0].finish_reason === "stop", whole);
  check("openai: its usage", whole.usage.prompt_tokens > 0 &&
    whole.usage.total_tokens === whole.usage.prompt_tokens + whole.usage.completion_tokens, whole.usage);

  const stream = client.chat.completions.stream(
    { model: MODEL, messages: ask("Hello"), stream_options: { include_usage: true } });
  let said = "";
  for await (const chunk of stream) said += chunk.choices[0]?.delta?.content ?? "";
  const last = await stream.finalChatCompletion();
  check("openai: a stream says the same", said === whole.choices[0].message.content &&
    last.choices[0].message.content === said && last.usage?.completion_tokens === whole.usage.completion_tokens, last);

  const asked = [];
  const runner = client.chat.completions.runTools({ model: MODEL, messages: ask("What is the weather?"), tools: [
    { type: "function", function: { ...tools[0].function, parse: JSON.parse,
      function: ({ city }) => (asked.push(city), { weather: "sunny" }) } }] });
  const answer = await runner.finalContent();
  check("openai: runTools", asked.join() === "Paris" && answer === "It is sunny in Paris.", [asked, answer]);
  const streamed = client.chat.completions.stream({ model: MODEL, messages: ask("What is the weather?"), tools });
  const done = await streamed.finalChatCompletion();
  const made = done.choices[0].message.tool_calls?.[0];
  check("openai: a call is streamed", done.choices[0].finish_reason === "tool_calls" &&
    made?.function.name === "get_weather" && JSON.parse(made.function.arguments).city === "Paris", done);

  const old = await client.completions.create({ model: MODEL, prompt: "Hello", max_tokens: 1 });
  check("openai: completions", old.choices.length === 1 && old.usage.completion_tokens === 1, old);
  const wrong = await new OpenAI({ baseURL: server.url, apiKey: "no", maxRetries: 0 }).models.list().catch(e => e);
  check("openai: a wrong key", wrong instanceof OpenAI.AuthenticationError, wrong);
  const bad = await client.chat.completions.create({ model: MODEL, messages: ask("Hello"), temperature: -1 })
    .catch(e => e);
  check("openai: a wrong field", bad instanceof OpenAI.BadRequestError && bad.param === "temperature", bad);
  const other = await client.chat.completions.create({ model: "another", messages: ask("Hello") }).catch(e => e);
  check("openai: a model that is not there", other instanceof OpenAI.NotFoundError, other);
  const cut = await client.chat.completions.create({ model: MODEL, messages: ask("Count"), stream: true });
  for await (const chunk of cut) if (chunk.choices[0]?.delta?.content) break;
  const metric = async name => +((await (await fetch(new URL("/metrics", server.url))).text())
    .match(new RegExp(`^${name}\\S* (\\S+)$`, "m"))?.[1] ?? NaN);
  for (let i = 0; i < 100 && await metric("vllm:num_requests_running"); i++) await new Promise(r => setTimeout(r, 20));
  check("openai: a stream that is left", await metric("vllm:num_requests_running") === 0, "it still runs");
  check("openai: the server drains", await server.stop() === 0, server.log());
}
