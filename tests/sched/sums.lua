-- Sums that an op hands to the storers itself: only where the next task of every list takes them and waits for nothing.
package.path = "tests/sched/?.lua;" .. package.path
local helper = require("helper")
local handing = require("handing")

local g

local function hands(op) return g.params[op].hands == 1 end
local function handed() return g.params.residual.handed == 1 end

g = helper.build("north-mini-code")
handing.run(g)
helper.ok("the last of a sum hands it on", hands("expert_down") and hands("dense_down") and handed())
helper.ok("who has more to add to it does not", not hands("o_proj"))
local words = helper.words(g)
helper.proved("as it is", g, words)

-- What the words must have: the next task, and no wait of its own.
local b = helper.broken(g, words)
b:remove(7, b:find(7, "layer3.residual"))
helper.refused("nobody takes the sum", b,
  "layer3.expert_down on SM 7 (task *) hands on a sum that the next task does not take")
b = helper.broken(g, words)
b:remove(7, b:find(7, "layer3.expert_down"))
helper.refused("nobody handed one on", b,
  "layer3.residual on SM 7 (task *) takes a sum that the task before has not handed on")
b = helper.broken(g, words)
local taker, waiter = b:find(9, "layer3.residual"), b:find(9, "layer3.norm")
for _, word in ipairs({ "wait_a", "arrivals_a" }) do b:set(9, taker, word, b:get(9, waiter, word)) end
helper.refused("it waits", b, "layer3.residual on SM 9 (task *) waits, but its sum was handed on before")

-- One list in which something stands between is enough.
g = helper.build("north-mini-code")
local list = g.lists[5]
for i, task in ipairs(list) do
  if task.node.name == "layer6.residual" then
    table.insert(list, i + 1, table.remove(list, i - 1))
    break
  end
end
handing.run(g)
helper.ok("an op does so everywhere or nowhere", not (hands("expert_down") or hands("dense_down") or handed()))

g = helper.build("north-mini-code", { schedule = { exchange = "validated" } })
handing.run(g)
helper.ok("nor where words tell that they are there", not (hands("expert_down") or handed()))
g = helper.build("north-mini-code", { schedule = { columns = 16 } })
handing.run(g)
helper.ok("nor with more columns than a product has", not (hands("expert_down") or handed()))
helper.done()
