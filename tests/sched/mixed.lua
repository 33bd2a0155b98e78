-- A step and a chunk in one launch: by the end of each SM's list in the step, all that touches the pages of keys and
-- values is over on all SMs. Where an SM comes to its end without knowing that, it is refused.
package.path = "tests/sched/?.lua;" .. package.path
local helper = require("helper")
local check = require("check")
local mixed = require("check.mixed")

local function prove(g, words, chunks)
  local _, _, proof = check.prove(g, words)
  return mixed.prove(proof, chunks)
end

local MODELS = { "nmc-toy", "north-mini-code", "llama-3.2-1b", "qwen3-30b-a3b", "command-r7b" }
for _, model in ipairs(MODELS) do
  for _, columns in ipairs(model == "nmc-toy" and { 8, 16, 64 } or { 8 }) do
    local g = helper.build(model, { schedule = { columns = columns } })
    local texts, stats = prove(g, helper.words(g), helper.build(model, { launch = "prefill" }))
    helper.ok(("%s, steps of %d columns"):format(model, columns), #texts == 0, texts[1])
    helper.ok(("%s: pages are what they share"):format(model),
      table.concat(stats.shared, " ") == "kv" and stats.accesses >= 2 * g.model.shape.layers * g.sms,
      ("%s: %d accesses"):format(table.concat(stats.shared, " "), stats.accesses))
  end
end

-- An SM that waits for nobody from the last layer on. (The step would be wrong too, and its own proof says so.)
local g = helper.build("nmc-toy")
local words, chunks = helper.words(g), helper.build("nmc-toy", { launch = "prefill" })
local last = ("layer%d"):format(g.model.shape.layers - 1)

local function message(b)
  local texts = prove(b.g, b.words, chunks)
  return table.concat(texts, "\n")
end

local b = helper.broken(g, words)
for task = b:find(77, last .. ".qkv"), b:tasks(77) - 1 do b:lose(77, task) end
local text = message(b)
helper.ok("an SM that knows of nobody's last attention",
  text:find("a mixed launch: SM 77 begins with the chunk, which has kv too, without being ordered after " ..
    last .. ".attention on SM ", 1, true) and
  text:find("which writes it", 1, true) and text:find("which reads it", 1, true), text)

-- The last tasks alone know no less: they wait for what is behind all of that.
b = helper.broken(g, words)
b:lose(77, b:tasks(77) - 1)
helper.ok("the last wait may be lost", message(b) == "", message(b))
helper.done()
