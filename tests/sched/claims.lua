-- Work that is claimed at run time: whoever has it, the proof holds; and it holds in the published orders.
package.path = "tests/sched/?.lua;" .. package.path
local helper = require("helper")

local ORDERS = { "released", "interleaved", "attention-first" }

local function order_of(name)
  local file = assert(io.open(("tests/bench/orders/%s.yaml"):format(name)))
  local text, order = file:read("a"), {}
  file:close()
  for wave in text:match("\n  order: %[(.-)%]"):gmatch("[%w_]+") do order[#order + 1] = wave end
  return order
end

-- Encoded words do not say how a claim is dealt, so one proof is for all ways.
local function words_as(how)
  return helper.words(helper.build("nmc-toy", { schedule = { claim = { up = how } } }))
end
local tail = words_as("tail")
for _, how in ipairs({ "static", "queue" }) do
  local words, same = words_as(how), true
  for sm, list in pairs(tail) do same = same and table.concat(list, " ") == table.concat(words[sm], " ") end
  helper.ok(("experts %s: the words of the tail"):format(how), same, "they differ")
end

for _, name in ipairs(ORDERS) do
  local g = helper.build("north-mini-code", { schedule = { order = order_of(name) } })
  local words = helper.words(g)
  helper.proved(name .. " is proved", g, words)

  -- Any SM may have had the last unit: every other one is waited for.
  local b = helper.broken(g, words)
  b:lose(3, b:find(3, "layer7.expert_down"))
  helper.refused(name .. ", down without its wait", b,
    ("%s reads h without being ordered after layer7.expert_up on SM * (task *), which writes it")
      :format(b:name(3, "layer7.expert_down")))

  b = helper.broken(g, words)
  local task = b:find(3, "layer7.expert_down")
  local slot = b:get(3, task, "wait_b") ~= -1 and "b" or "a"
  local arrivals = b:get(3, task, "arrivals_" .. slot)
  b:set(3, task, "arrivals_" .. slot, arrivals - 2)
  helper.refused(name .. ", down waits for all claimers but one", b,
    ("%s waits for only %d of the %d arrivals of counter *: a partial wait does not say who arrived*")
      :format(b:name(3, "layer7.expert_down"), arrivals - 2, arrivals))

  -- Who claims from another layer's ticket takes that layer's units.
  b = helper.broken(g, words)
  b:set(60, b:find(60, "layer7.expert_up"), "ticket", 8)
  helper.refused(name .. ", a ticket of another layer", b,
    ("%s: field ticket is 8, the graph says 7"):format(b:name(60, "layer7.expert_up")))

  b = helper.broken(g, words)
  b:set(60, b:find(60, "layer7.route"), "ticket", 8)
  helper.refused(name .. ", a reset of another layer's ticket", b,
    ("%s: field ticket is 8, the graph says 7"):format(b:name(60, "layer7.route")))

  b = helper.broken(g, words)
  b:set(60, b:find(60, "layer7.expert_up"), "rank", b:get(61, b:find(61, "layer7.expert_up"), "rank"))
  helper.refused(name .. ", two SMs of one rank", b,
    "layer7.expert_up on SM 61 (task *): rank * is taken by another SM")

  b = helper.broken(g, words)
  b:remove(60, b:find(60, "layer7.expert_up"))
  helper.refused(name .. ", an SM that does not claim", b, "layer7.expert_up: SMs 60 to 60 are in no list")
end
helper.done()
