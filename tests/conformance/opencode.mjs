// `opencode run` with examples/opencode.json: it reads a file, edits it, and finishes.
import { spawn } from "node:child_process";
import { mkdirSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { KEY, call, check, folder, read, serve, text, top } from "./helper.mjs";

export default async function () {
  const project = join(folder, "project"), file = join(project, "greet.py"), home = join(folder, "home");
  mkdirSync(project), mkdirSync(home);
  writeFileSync(file, "def greet(name):\n    return \"Hello, \" + name\n");
  const results = "<|START_TOOL_RESULT|>";
  const server = await serve([
    { has: ["title generator"], say: text("Another greeting") },
    { has: [results, "\"tool_name\": \"edit\""], say: text("greet now says goodbye.", "That is all.") },
    { has: [results, "\"tool_name\": \"read\"", "Hello, "],
      say: call("edit", { filePath: file, oldString: "Hello, ", newString: "Goodbye, " }, "I have seen it.") },
    { has: ["greet.py", "\"name\": \"read\""], lacks: [results],
      say: call("read", { filePath: file }, "I look first.") },
  ]);
  const config = JSON.parse(read(join(top, "examples/opencode.json")));
  config.provider.nmk.options.baseURL = server.url;
  config.autoupdate = false, config.share = "disabled";
  writeFileSync(join(project, "opencode.json"), JSON.stringify(config));
  const env = { PATH: process.env.PATH, HOME: home, NMK_API_KEY: KEY, OPENCODE_DISABLE_AUTOUPDATE: "1",
    OPENCODE_DISABLE_MODELS_FETCH: "1", OPENCODE_DISABLE_LSP_DOWNLOAD: "1", OPENCODE_DISABLE_DEFAULT_PLUGINS: "1" };
  const program = join(import.meta.dirname, "node_modules/.bin/opencode");
  const run = spawn(program, ["run", "Make greet.py say goodbye in place of hello."],
    { cwd: project, env, stdio: ["ignore", "pipe", "pipe"] });
  let out = "", err = "";
  run.stdout.on("data", data => { out += data; }), run.stderr.on("data", data => { err += data; });
  const timer = setTimeout(() => run.kill("SIGKILL"), 120000);
  const code = await new Promise(resolve => run.on("close", resolve));
  clearTimeout(timer);
  check("opencode: run ends well", code === 0, [code, out.slice(-500), err.slice(-1500), server.log().slice(-1500)]);
  check("opencode: it has read and edited the file",
    read(file) === "def greet(name):\n    return \"Goodbye, \" + name\n", read(file));
  check("opencode: it says what the model said", out.includes("greet now says goodbye."), [out, err]);
  const asked = server.log().split("\n").filter(line => line.includes("request finished"));
  check("opencode: its requests are answered", asked.length >= 3 && asked.every(line => line.includes("status=200")),
    asked);
  check("opencode: what it sends again comes from the cache",
    asked.some(line => +line.match(/cached_tokens=(\d+)/)[1] > 1000), asked);
  check("opencode: the server drains", await server.stop() === 0, server.log());
}
