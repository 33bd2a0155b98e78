// A server whose answers are scripted (tests/conformance/scripted.c), and one line of result a case.
import { spawn } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";

export const KEY = "sesame-open", MODEL = "north-mini-code";
export const top = join(import.meta.dirname, "../..");
export const folder = mkdtempSync(join(tmpdir(), "nmk-conformance-"));
process.on("exit", () => rmSync(folder, { recursive: true, force: true }));

let failed = false;
export function check(name, good, why) {
  console.log(good ? `ok - ${name}` : `not ok - ${name}: ${typeof why === "string" ? why : JSON.stringify(why)}`);
  if (!good) failed = true;
}
export const status = () => failed ? 1 : 0;

// Runs a part; what it throws is a case that failed.
export async function part(name, run) {
  try {
    await run();
  } catch (e) {
    check(name, false, e.stack || String(e));
  }
}

// What the model says, in its own markup, from behind the beginning of its thoughts on.
export const text = (answer, thoughts = "") => `${thoughts}<|END_THINKING|><|START_TEXT|>${answer}<|END_TEXT|>`;
export const call = (name, parameters, thoughts = "") =>
  `${thoughts}<|END_THINKING|><|START_ACTION|>[{"tool_call_id": "0", "tool_name": ${JSON.stringify(name)}, ` +
  `"parameters": ${JSON.stringify(parameters)}}]<|END_ACTION|>`;

// Resolves to { url, stop() }, once it listens.
export function serve(rules) {
  const script = join(folder, "script.json");
  writeFileSync(script, JSON.stringify(rules));
  const flags = ["--checkpoint", "checkpoint", "--random-weights", "1", "--device", "cuda:0", "--port", "0",
    "--api-key", KEY, "--served-model-name", MODEL];
  const server = spawn("./serve", flags,
    { cwd: import.meta.dirname, env: { ...process.env, NMK_SCRIPT: script }, stdio: ["ignore", "ignore", "pipe"] });
  const ended = new Promise(resolve => server.on("exit", resolve));
  let log = "";
  process.on("exit", () => server.kill("SIGKILL"));
  return new Promise((resolve, reject) => {
    ended.then(code => reject(new Error(`the server ended with ${code}: ${log}`)));
    server.stderr.on("data", data => {
      log += data;
      const url = log.match(/listening url=(\S+)/);
      if (url) resolve({ url: url[1], log: () => log, stop: () => (server.kill("SIGTERM"), ended) });
    });
  });
}

export const read = path => readFileSync(path, "utf8");
