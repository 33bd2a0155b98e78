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
helper.done()
