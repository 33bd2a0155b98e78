-- Waits for another number of arrivals than a counter gets.
package.path = "tests/sched/?.lua;" .. package.path
local helper = require("helper")

local g = helper.build("north-mini-code")
local words = helper.words(g)

local function with_threshold(sm, name, change)
  local b = helper.broken(g, words)
  local task = b:find(sm, name)
  b:set(sm, task, "arrivals_a", b:get(sm, task, "arrivals_a") + change)
  return b, b:get(sm, task, "wait_a")
end

local b, counter = with_threshold(17, "layer3.attention", -2)
helper.refused("one task's arrivals are not waited for", b, {
  ("%s waits for only 262 of the 264 arrivals of counter %d (layer3.qkv): a partial wait does not say who arrived")
    :format(b:name(17, "layer3.attention"), counter),
  ("%s reads qkv without being ordered after layer3.qkv on SM * (task *), which writes it")
    :format(b:name(17, "layer3.attention")),
})

b, counter = with_threshold(0, "layer5.route", -1)
helper.refused("one warp's arrival is not waited for", b,
  ("%s waits for only 15 of the 16 arrivals of counter %d (layer5.router): a partial wait does not say who arrived")
    :format(b:name(0, "layer5.route"), counter))

b, counter = with_threshold(0, "layer5.route", 1)
helper.refused("more arrivals than there are", b,
  ("%s waits for 17 arrivals of counter %d (layer5.router), which can never be met: it gets 16")
    :format(b:name(0, "layer5.route"), counter))

b = helper.broken(g, words)
local task = b:find(9, "layer2.o_proj")
b:set(9, task, "wait_a", g.counters + 4)
helper.refused("a counter that nothing signals", b,
  ("%s waits for counter %d, which nothing signals"):format(b:name(9, "layer2.o_proj"), g.counters + 4))

-- The kernel looks for a second wait only where there is a first.
b = helper.broken(g, words)
task = b:find(9, "layer2.o_proj")
b:set(9, task, "wait_b", b:get(9, task, "wait_a")):set(9, task, "arrivals_b", b:get(9, task, "arrivals_a"))
b:set(9, task, "wait_a", -1)
helper.refused("a second wait without a first", b,
  ("%s has a second wait but no first"):format(b:name(9, "layer2.o_proj")))

-- The node that should signal does not.
b = helper.broken(g, words)
for sm = 0, g.sms - 1 do b:set(sm, b:find(sm, "layer2.attention"), "signal", -1) end
task = b:find(0, "layer2.combine")
helper.refused("a node that lost its counter", b,
  ("layer2.combine on SM * (task *) waits for counter %d, which nothing signals (and 131 more like it)")
    :format(b:get(0, task, "wait_a")))

-- One task of the node does not signal.
b = helper.broken(g, words)
b:set(77, b:find(77, "layer2.attention"), "signal", -1)
helper.refused("a task that lost its signal", b,
  ("* waits for 264 arrivals of counter %d (layer2.attention), which can never be met: it gets 262" ..
    " (and 131 more like it)"):format(b:get(0, b:find(0, "layer2.combine"), "wait_a")))
helper.done()
