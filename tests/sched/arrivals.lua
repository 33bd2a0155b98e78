-- Work that is done twice, not at all, or signalled on somebody else's counter.
package.path = "tests/sched/?.lua;" .. package.path
local helper = require("helper")

local g = helper.build("north-mini-code")
local words = helper.words(g)

local b = helper.broken(g, words)
local task = b:find(17, "layer3.qkv")
b:repeat_task(17, task)
helper.refused("a task twice in a list", b, {
  ("double arrival: layer3.qkv on SM 17 (task %d) repeats tiles %d of %s"):format(task + 1, b:get(17, task, "tile"),
    b:name(17, "layer3.qkv")),
  "* waits for only 264 of the 266 arrivals of counter * (layer3.qkv): a partial wait does not say who arrived" ..
    " (and 131 more like it)",
})

b = helper.broken(g, words)
task = b:find(50, "layer3.attention")
b:repeat_task(50, task)
helper.refused("an every task twice on an SM", b,
  ("double arrival: layer3.attention on SM 50 (task %d) repeats SMs 50 of %s"):format(task + 1,
    b:name(50, "layer3.attention")))

-- Two SMs with the same tiles.
b = helper.broken(g, words)
task = b:find(18, "layer3.qkv")
b:set(18, task, "tile", b:get(17, b:find(17, "layer3.qkv"), "tile")):set(18, task, "tiles", 1)
helper.refused("the same tile on two SMs", b, ("double arrival: %s repeats tiles %d of %s"):format(
  b:name(18, "layer3.qkv"), b:get(18, task, "tile"), b:name(17, "layer3.qkv")))

b = helper.broken(g, words)
b:set(60, b:find(60, "layer3.combine"), "first", 61)
helper.refused("the same units on two SMs", b, {
  ("double arrival: %s repeats units 61 of %s"):format(b:name(61, "layer3.combine"), b:name(60, "layer3.combine")),
})

b = helper.broken(g, words)
b:remove(30, b:find(30, "layer3.o_proj"))
helper.refused("a tile that nobody does", b, "layer3.o_proj: tiles 30 to 30 are in no list")

b = helper.broken(g, words)
b:remove(30, b:find(30, "layer3.norm"))
helper.refused("a norm that is left out", b,
  ("%s reads xn as layer2.norm left it, the graph says layer3.norm"):format(b:name(30, "layer3.qkv")))

b = helper.broken(g, words)
b:remove(30, b:find(30, "layer3.attention"))
helper.refused("an SM without attention", b, "layer3.attention: SMs 30 to 30 are in no list")

b = helper.broken(g, words)
local other = b:get(17, b:find(17, "layer3.qkv"), "signal")
local router_sm
for sm = 0, g.sms - 1 do
  if not router_sm and pcall(b.find, b, sm, "layer3.router") then router_sm = sm end
end
b:set(router_sm, b:find(router_sm, "layer3.router"), "signal", other)
helper.refused("two nodes on one counter", b,
  ("* signals counter %d, which belongs to *: a counter has one node or the passes of one"):format(other))

b = helper.broken(g, words)
b:set(0, b:find(0, "layer3.norm"), "signal", 3)
helper.refused("an op that writes nothing signals", b,
  ("%s signals counter 3 (*), but the op writes nothing that others wait for"):format(b:name(0, "layer3.norm")))
helper.done()
