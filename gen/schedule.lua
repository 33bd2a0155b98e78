-- Deals every node's work to SMs: the order of an SM's list is wave order.
--
-- How work is dealt is the op's `tile`:
--   spread   tiles as one contiguous range per SM; those that do not divide go to the SMs that the placement puts first
--   owner    tile i on SM i, counted from the pass's first: what an SM owns stays in its registers over several ops
--   every    one task on every SM
--   cyclic   units first, first+step, ... on SM `first`
--   columns  one task per column
-- An SM without work gets no task, but of an op that is `idle`; nor one whose result stays on the SM and is used by
-- nobody there.
--
-- Cost is bytes streamed. By default (placement.lua has the other rules) first what this layer has given the SM so far
-- counts, because a layer ends only when its slowest SM does, then all that went before, then the SM's number.
local placement = require("placement")

local M = {}

local function zeros(sms)
  local list = {}
  for sm = 0, sms - 1 do list[sm] = 0 end
  return list
end

-- A task's fields: its own, and the node's behind them.
local function own_fields(node, fields)
  node.inherit = node.inherit or { __index = node.fields }
  return setmetatable(fields, node.inherit)
end

local deal = {}

function deal.spread(g, node, state)
  local sms, tiles = g.sms, node.tiles
  local count, extra = {}, tiles % sms
  for sm = 0, sms - 1 do count[sm] = tiles // sms end
  local order = extra > 0 and state.order(state.layer, state.total, extra)
  for i = 1, extra do count[order[i]] = count[order[i]] + 1 end
  local first = 0
  for sm = 0, sms - 1 do
    if count[sm] > 0 or node.spec.idle then
      state.place(node, sm, own_fields(node, { tile = first, tiles = count[sm] }))
      first = first + count[sm]
    end
  end
end

function deal.owner(g, node, state)
  assert(node.tiles <= g.sms, node.name)
  for sm = 0, node.tiles - 1 do
    state.place(node, sm, own_fields(node, { tile = node.first_tile + sm }))
  end
end

-- rank: the order in which SMs get the remainder of work that is dealt at run time; those that the whole layer's static
-- work loads least come first.
function deal.every(g, node, state)
  local rank
  if node.spec.word.rank then
    rank = {}
    for i, sm in ipairs(state.order(state.whole_layer(node.layer), state.total, 0)) do rank[sm] = i - 1 end
  end
  for sm = 0, g.sms - 1 do
    state.place(node, sm, rank and own_fields(node, { rank = rank[sm] }) or node.fields)
  end
end

function deal.cyclic(g, node, state)
  for sm = 0, math.min(g.sms, node.units) - 1 do
    state.place(node, sm, own_fields(node, { first = sm, step = g.sms, ["end"] = node.units }))
  end
end

function deal.columns(g, node, state)
  for column = 0, g.columns - 1 do
    state.place(node, column % g.sms, own_fields(node, { column = column }))
  end
end

-- Drops tasks that only write SM-local data which no later task of the SM reads before it is written again: a norm
-- where the layer has no row tile for the SM. Nobody would hear that such a task is done with what it reads.
local function drop_unused(g)
  local dropped = {}
  for sm = 0, g.sms - 1 do
    local list, kept, needed = g.lists[sm], {}, {}
    for i = #list, 1, -1 do
      local op = list[i].node.spec
      local used = false
      for _, r in ipairs(op.writes) do used = used or r.scope ~= "sm" or needed[r.name] end
      if used then
        for _, r in ipairs(op.writes) do needed[r.name] = nil end
        for _, r in ipairs(op.reads) do needed[r.name] = r.scope == "sm" or nil end
        kept[#kept + 1] = list[i]
      else
        dropped[list[i]] = true
      end
    end
    if #kept < #list then
      for i = 1, #kept do list[i] = kept[#kept + 1 - i] end
      for i = #kept + 1, #list do list[i] = nil end
    end
  end
  if not next(dropped) then return end
  for _, node in ipairs(g.nodes) do
    local tasks = {}
    for _, task in ipairs(node.tasks) do
      if not dropped[task] then tasks[#tasks + 1] = task end
    end
    node.tasks = tasks
  end
end

--- Requires: the graph with its fields filled in by memory. Leaves: node.tasks, g.lists[sm] (0-based) in wave order,
--- and g.cost[sm], the bytes each SM streams.
function M.run(g, diag)
  local sms = g.sms
  local state = { diag = diag, layer = zeros(sms), total = zeros(sms) }
  state.order = placement.orderer(g.model.schedule.placement, sms)
  g.lists = {}
  for sm = 0, sms - 1 do g.lists[sm] = {} end

  -- What a cost may name: the SM and the grid, a task's fields, the op's parameters.
  local task_fields, params
  local env = setmetatable({ sms = sms, columns = g.columns }, { __index = function(_, name)
    local value = task_fields[name]
    if value == nil then value = params[name] end
    return value
  end })
  local function cost_of(node, sm, fields)
    env.sm, task_fields, params = sm, fields, g.params[node.op]
    return node.spec.eval_cost(env)
  end

  function state.place(node, sm, fields)
    -- sync's fields, so that there is room for them.
    local task = { sm = sm, node = node, fields = fields, waits = false, ["local"] = 0 }
    local list = g.lists[sm]
    list[#list + 1] = task
    node.tasks[#node.tasks + 1] = task
    if node.spec.cost == "0" then return end
    local cost = cost_of(node, sm, fields)
    state.layer[sm] = state.layer[sm] + cost
    state.total[sm] = state.total[sm] + cost
  end

  -- What the layer's nodes give each SM: those dealt so far, and those still to come that have their SM by tile number.
  function state.whole_layer(layer)
    local cost = {}
    for sm = 0, sms - 1 do cost[sm] = state.layer[sm] end
    for id = state.node.id + 1, #g.nodes do
      local node = g.nodes[id]
      if node.layer ~= layer then break end
      if node.spec.tile == "owner" and node.spec.cost ~= "0" then
        for sm = 0, node.tiles - 1 do
          cost[sm] = cost[sm] + cost_of(node, sm, own_fields(node, { tile = node.first_tile + sm }))
        end
      end
    end
    return cost
  end

  local layer
  for _, node in ipairs(g.nodes) do
    if node.layer ~= layer then layer, state.layer = node.layer, zeros(sms) end
    node.tasks, state.node = {}, node
    deal[node.spec.tile](g, node, state)
  end
  drop_unused(g)
  g.cost = state.total
  return g
end

return M
