-- Lists of launches that take prompts: what the generator makes is proved, and broken on purpose it is refused. Their
-- load copies what the launch itself has written, and any SM may have written any of it.
package.path = "tests/sched/?.lua;" .. package.path
local helper = require("helper")

local MODELS = { "north-mini-code", "nmc-toy", "llama-3.2-1b", "qwen3-30b-a3b" }
for _, model in ipairs(MODELS) do
  local g = helper.build(model, { launch = "prefill" })
  helper.proved(model, g, helper.words(g))
end
for _, sms in ipairs({ 16, 114, 144 }) do
  local g = helper.build("nmc-toy", { launch = "prefill", sms = sms })
  helper.proved(("nmc-toy on %d SMs"):format(sms), g, helper.words(g))
end

local g = helper.build("north-mini-code", { launch = "prefill" })
local words = helper.words(g)

-- SM, node that loses its waits, buffer it reads, node that writes it.
local CASES = {
  { 131, "layer20.prefill_norm", "o", "layer19.prefill_o_proj" },
  { 0, "layer20.prefill_norm", "mlp", "layer19.prefill_expert_down" },
  { 90, "layer1.prefill_router", "xn", "layer1.prefill_norm" },
  { 17, "layer3.prefill_unpack", "pages", "layer3.prefill_qkv" },
  { 17, "layer3.prefill_sort", "counts", "layer3.prefill_route" },
  { 40, "layer7.prefill_expert_up", "pair", "layer7.prefill_sort" },
  { 40, "layer7.prefill_o_proj", "attn", "layer7.prefill_attention" },
  { 3, "layer47.prefill_expert_down", "h", "layer47.prefill_expert_up" },
}
for _, case in ipairs(CASES) do
  local sm, reader, buffer, writer = table.unpack(case)
  local b = helper.broken(g, words)
  b:lose(sm, b:find(sm, reader))
  helper.refused(("%s without its wait, %s"):format(reader, buffer), b,
    ("%s reads %s without being ordered after %s on SM * (task *), which writes it")
      :format(b:name(sm, reader), buffer, writer))
end

-- A wait for less than all SMs; a task that is nowhere; one that comes twice; waves that change places.
local b = helper.broken(g, words)
local task = b:find(5, "layer2.prefill_norm")
b:set(5, task, "arrivals_a", b:get(5, task, "arrivals_a") - 1)
helper.refused("a wait for 131 of 132", b,
  "layer2.prefill_norm on SM 5 (task *) waits for only 131 of the 132 arrivals*")

b = helper.broken(g, words)
b:remove(7, b:find(7, "layer2.prefill_attention"))
helper.refused("a task less", b, "layer2.prefill_attention: SMs 7 to 7 are in no list")

b = helper.broken(g, words)
b:repeat_task(7, b:find(7, "layer2.prefill_attention"))
helper.refused("a task twice", b, "double arrival: layer2.prefill_attention on SM 7 (task *) repeats SMs 7 of *")

-- o_proj follows down in the lists: the norm that waits for o_proj alone knows by that that down is over.
b = helper.broken(g, words)
for sm = 0, g.sms - 1 do
  local at = b:find(sm, "layer2.prefill_expert_down")
  b:swap(sm, at, at + 1)
end
helper.refused("down after o_proj", b,
  "layer3.prefill_norm on SM * (task *) reads mlp without being ordered after layer2.prefill_expert_down*")
helper.done()
