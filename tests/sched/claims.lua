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

local function build(up, attention, order)
  local schedule = { claim = { up = up, attention = attention }, order = order }
  return helper.build(order and "north-mini-code" or "nmc-toy", { schedule = schedule })
end

-- Encoded words do not say how a claim is dealt, so one proof is for all ways.
local function same_words(what, a, b)
  local words, others, same = helper.words(a), helper.words(b), true
  for sm, list in pairs(words) do same = same and table.concat(list, " ") == table.concat(others[sm], " ") end
  helper.ok(what, same, "they differ")
end
local tail = build("tail", "static")
for _, how in ipairs({ "static", "queue" }) do
  same_words(("experts %s: the words of the tail"):format(how), tail, build(how, "static"))
end
local queue = build("tail", "queue")
same_words("attention of full layers claimed: the words of all claimed", queue, build("tail", "full"))

-- What is dealt is known unit by unit, what is claimed is not.
local function part_of(g)
  for _, r in ipairs(g.registry.by_name.attention.writes) do
    if r.name == "part" then return r.claim end
  end
end
helper.ok("attention dealt", part_of(build("tail", "static")) == false, "its part is claimed")
helper.ok("attention claimed", part_of(build("tail", "queue")) == true, "its part is dealt")
helper.ok("tickets", queue.tickets == 2 * tail.tickets and tail.tickets == 5, queue.tickets .. " and " .. tail.tickets)

for _, name in ipairs(ORDERS) do
  local g = build("queue", "full", order_of(name))
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

  -- The same for attention, whose partials a combine of a few slots could tell apart were they dealt.
  b = helper.broken(g, words)
  b:lose(3, b:find(3, "layer7.combine"))
  helper.refused(name .. ", combine without its wait", b,
    ("%s reads part without being ordered after layer7.attention on SM * (task *), which writes it")
      :format(b:name(3, "layer7.combine")))

  b = helper.broken(g, words)
  b:remove(60, b:find(60, "layer7.attention"))
  helper.refused(name .. ", an SM that claims no attention", b, "layer7.attention: SMs 60 to 60 are in no list")

  b = helper.broken(g, words)
  b:remove(60, b:find(60, "layer7.expert_up"))
  helper.refused(name .. ", an SM that does not claim", b, "layer7.expert_up: SMs 60 to 60 are in no list")
end
helper.done()
