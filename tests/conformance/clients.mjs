// Clients that others make against nmk-serve with scripted answers; `make conformance`.
import { part, read, status } from "./helper.mjs";
import ai from "./ai.mjs";
import anthropic from "./anthropic.mjs";
import openai from "./openai.mjs";
import opencode from "./opencode.mjs";
import responses from "./responses.mjs";

for (const name of ["openai", "@anthropic-ai/sdk", "ai", "@ai-sdk/openai-compatible", "opencode-ai"])
  console.log(`${name} ${JSON.parse(read(`${import.meta.dirname}/node_modules/${name}/package.json`)).version}`);
await part("openai", openai);
await part("responses", responses);
await part("anthropic", anthropic);
await part("ai", ai);
await part("opencode", opencode);
process.exit(status());
