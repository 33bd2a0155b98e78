-- The route in shared memory: two copies, used in turn by consecutive MoE layers.
package.path = "tests/sched/?.lua;" .. package.path
local helper = require("helper")

local g = helper.build("north-mini-code")
local words = helper.words(g)

-- An SM that no longer waits for anything after layer 5 may fill a copy while its storers still work from it.
local b = helper.broken(g, words)
for layer = 6, 9 do
  for _, op in ipairs({ "norm", "route", "attention" }) do
    local name = ("layer%d.%s"):format(layer, op)
    b:lose(130, b:find(130, name))
  end
end
helper.refused("a copy that is overwritten too early", b,
  ("%s overwrites the copy of route that role store of %s still reads (instance 5)")
    :format(b:name(130, "layer8.route"), b:name(130, "layer6.expert_up")))

-- The next layer writes into the copy that this layer reads.
b = helper.broken(g, words)
b:set(17, b:find(17, "layer7.route"), "local", 5)
helper.refused("the same instance twice", b, {
  ("%s writes instance 5 of route, the SM's next is 6"):format(b:name(17, "layer7.route")),
  ("the ring blocks: %s waits for instance 6 of route, which no earlier task of the SM writes")
    :format(b:name(17, "layer7.expert_up")),
})

-- A reader that takes the previous layer's route.
b = helper.broken(g, words)
b:set(17, b:find(17, "layer7.expert_up"), "local", 5)
helper.refused("the route of another layer", b,
  ("%s reads instance 5 of route as layer6.route left it, the graph says layer7.route")
    :format(b:name(17, "layer7.expert_up")))

-- A reader ahead of its writer.
b = helper.broken(g, words)
b:set(17, b:find(17, "layer7.expert_down"), "local", 7)
helper.refused("the route of a later layer", b,
  ("the ring blocks: %s waits for instance 7 of route, which no earlier task of the SM writes")
    :format(b:name(17, "layer7.expert_down")))

-- With posted h no counter tells that the storers are done with a copy: they return it, and the writer waits for that.
g = helper.build("qwen3-30b-a3b", { schedule = { exchange = "validated" } })
words = helper.words(g)
helper.proved("a copy that is returned", g, words)
local function route_of(op_name, way, role)
  for _, region in ipairs(g.registry.by_name[op_name][way]) do
    if region.name == "route" and region.role == role then return region end
  end
end
local returned, waited = route_of("expert_up", "reads", "store"), route_of("route", "writes", "compute")
local early = "layer2.route on SM * (task *) overwrites the copy of route that role store of layer0.expert_up on " ..
  "SM * (task *) still reads (instance 0)*"
waited.waited = false
helper.refused("a writer that does not wait for the copy", helper.broken(g, words), early)
waited.waited, returned.returned = true, false
helper.refused("a copy that nobody returns", helper.broken(g, words), {
  early, "layer2.route on SM * (task *) waits until instance 0 of route is returned, as 0 tasks do*",
})
returned.returned = true
b = helper.broken(g, words)
b:set(17, b:find(17, "layer2.expert_up"), "local", 1)
helper.refused("a copy that is returned twice", b,
  "layer3.route on SM * (task *) waits until instance 1 of route is returned, as 2 tasks do*")
helper.done()
