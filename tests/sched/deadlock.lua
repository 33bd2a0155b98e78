-- Lists that do not run to their end: tasks that wait for each other, and orders that the ring blocks on.
package.path = "tests/sched/?.lua;" .. package.path
local helper = require("helper")

local g = helper.build("north-mini-code")
local words = helper.words(g)

-- qkv on one SM waits for all of attention, which waits for all of qkv.
local b = helper.broken(g, words)
local qkv, attention = b:find(17, "layer3.qkv"), b:find(17, "layer3.attention")
local qkv_counter, attention_counter = b:get(17, qkv, "signal"), b:get(17, attention, "signal")
b:set(17, qkv, "wait_a", attention_counter):set(17, qkv, "arrivals_a", 264)
helper.refused("a cycle over two nodes", b, ("deadlock: %s waits for counter %d (layer3.qkv), which lacks %s; " ..
  "%s waits for counter %d (layer3.attention), which lacks %s"):format(b:name(0, "layer3.attention"), qkv_counter,
  b:name(17, "layer3.qkv"), b:name(17, "layer3.qkv"), attention_counter, b:name(0, "layer3.attention")))

-- A task that waits for its own counter.
b = helper.broken(g, words)
b:set(17, qkv, "wait_a", qkv_counter):set(17, qkv, "arrivals_a", 264)
helper.refused("a task waits for itself", b, ("deadlock: %s waits for counter %d (layer3.qkv), which lacks %s"):format(
  b:name(17, "layer3.qkv"), qkv_counter, b:name(17, "layer3.qkv")))

-- The compute role reaches a wait before the task of its own list that has to signal.
b = helper.broken(g, words)
b:swap(17, qkv, attention)
helper.refused("attention before qkv in one list", b,
  ("deadlock: %s waits for counter %d (layer3.qkv), which lacks %s"):format(b:name(17, "layer3.attention"), qkv_counter,
    b:name(17, "layer3.qkv")))

-- The producer reaches a task whose experts only a later task of the list names. The ring is one queue: nothing passes.
b = helper.broken(g, words)
b:swap(17, b:find(17, "layer3.route"), b:find(17, "layer3.expert_up"))
helper.refused("expert_up before route in one list", b,
  ("the ring blocks: %s waits for instance 2 of route, which no earlier task of the SM writes"):format(
    b:name(17, "layer3.expert_up")))

-- A cycle of three SMs: a chain of waits that no single pair shows.
local toy = helper.build("nmc-toy")
b = helper.broken(toy, helper.words(toy))
local up = b:find(40, "layer1.expert_up")
b:set(40, up, "wait_a", b:get(0, b:find(0, "layer1.residual"), "signal")):set(40, up, "arrivals_a", 32)
helper.refused("expert_up waits for the end of its layer", b,
  ("deadlock: * waits for counter * (layer1.expert_up), which lacks %s; %s waits for counter * (layer1.residual), " ..
  "which lacks layer1.residual on SM * (task *)")
    :format(b:name(40, "layer1.expert_up"), b:name(40, "layer1.expert_up")))
helper.done()
