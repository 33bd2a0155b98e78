-- A wait that is lost: what the task then reads is not proved to be there.
package.path = "tests/sched/?.lua;" .. package.path
local helper = require("helper")

local g = helper.build("north-mini-code")
local words = helper.words(g)

-- SM, node that loses its waits, buffer it reads, node that writes it.
local CASES = {
  { 131, "layer20.norm", "xb0", "layer19.residual" },
  { 90, "layer1.route", "logits", "layer1.router" },
  { 17, "layer3.attention", "qkv", "layer3.qkv" },
  { 40, "layer7.combine", "part", "layer7.attention" },
  { 40, "layer7.o_proj", "attn", "layer7.combine" },
  { 3, "layer48.expert_down", "h", "layer48.expert_up" },
  { 5, "sample", "cand", "lm_head" }, { 5, "sample", "drawn", "draw" }, { 90, "cut", "scores", "lm_head" },
  { 90, "cut2", "cuts", "cut" }, { 17, "cut6", "cuts", "cut5" }, { 3, "draw", "cuts", "cut6" },
}
for _, case in ipairs(CASES) do
  local sm, reader, buffer, writer = table.unpack(case)
  local b = helper.broken(g, words)
  b:lose(sm, b:find(sm, reader))
  helper.refused(("%s without its wait, %s"):format(reader, buffer), b,
    ("%s reads %s without being ordered after %s on SM * (task *), which writes it")
      :format(b:name(sm, reader), buffer, writer))
end

-- The same on every SM is one message.
local b = helper.broken(g, words)
for sm = 0, g.sms - 1 do b:lose(sm, b:find(sm, "layer3.attention")) end
helper.refused("attention without its wait on all SMs", b,
  "layer3.attention on SM * (task *) reads qkv without being ordered after layer3.qkv on SM * (task *), which " ..
  "writes it (and 131 more like it)")

-- A chain: consumers merge the partials and tell of it; they add up sums, of which their SM's storers tell. Last: the
-- registry is settled for this graph now.
local summed = helper.build("qwen3-30b-a3b", { shape = { layers = 8 } })
local sums = helper.words(summed)
helper.proved("sums of all SMs", summed, sums)
for _, case in ipairs({ { "combine", "part", "attention" }, { "o_proj", "attn", "combine" } }) do
  local s, reader = helper.broken(summed, sums), "layer7." .. case[1]
  s:lose(40, s:find(40, reader))
  helper.refused(("%s of a chain without its wait"):format(reader), s,
    ("%s reads %s without being ordered after layer7.%s on SM * (task *), which writes it")
      :format(s:name(40, reader), case[2], case[3]))
end
local s = helper.broken(summed, sums)
s:lose(90, s:find(90, "layer1.route"))
helper.refused("a route without its wait", s,
  ("%s reads logits without being ordered after layer1.router_sum on SM * (task *), which writes it*")
    :format(s:name(90, "layer1.route")))
s = helper.broken(summed, sums)
s:lose(0, s:find(0, "layer5.clear_logits"))
helper.refused("sums emptied before all have read them", s, {
  ("%s writes logits without being ordered after layer4.router_sum on SM 0 (task *), which writes it before")
    :format(s:name(0, "layer5.clear_logits")),
  ("%s writes logits without being ordered after layer4.route on SM 0 (task *), which reads what it overwrites")
    :format(s:name(0, "layer5.clear_logits")),
})
helper.done()
