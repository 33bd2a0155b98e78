-- Which SMs take the work that does not divide evenly: the tiles of a wave that are left over, and the first places
-- where work is claimed at run time.  A rule gives all SMs in an order; whoever comes first takes more.
--
--   layer_cost    least bytes so far in this layer, then least bytes so far in the step, then the lower number
--   greedy        least bytes so far in the step, then the lower number
--   round_robin   goes on behind the SM that took the last left-over of the wave before
--   random        a shuffle for each wave, the same for the same seed
local M = {}

M.RULES = { "layer_cost", "round_robin", "greedy", "random" }
M.DEFAULT = { rule = "layer_cost", seed = 0 }

local function numbers(sms)
  local order = {}
  for sm = 0, sms - 1 do order[sm + 1] = sm end
  return order
end

local rules = {}

function rules.layer_cost(_, sms, layer, total)
  local order = numbers(sms)
  table.sort(order, function(a, b)
    if layer[a] ~= layer[b] then return layer[a] < layer[b] end
    if total[a] ~= total[b] then return total[a] < total[b] end
    return a < b
  end)
  return order
end

function rules.greedy(_, sms, _, total)
  local order = numbers(sms)
  table.sort(order, function(a, b)
    if total[a] ~= total[b] then return total[a] < total[b] end
    return a < b
  end)
  return order
end

function rules.round_robin(state, sms, _, _, left)
  local order, first = {}, state.first
  for i = 0, sms - 1 do order[i + 1] = (first + i) % sms end
  state.first = (first + left) % sms
  return order
end

-- splitmix64: the same shuffle on every machine and with every Lua.
local function draw(state)
  state.word = state.word + 0x9e3779b97f4a7c15
  local z = state.word
  z = (z ~ z >> 30) * 0xbf58476d1ce4e5b9
  z = (z ~ z >> 27) * 0x94d049bb133111eb
  return z ~ z >> 31
end

--- A generator of 64-bit words; draw(n) is below n.
function M.random(seed)
  local state = { word = seed }
  return function(n) return (draw(state) >> 1) % n end
end

function rules.random(state, sms)
  local order = numbers(sms)
  for i = sms, 2, -1 do
    local j = state.below(i) + 1
    order[i], order[j] = order[j], order[i]
  end
  return order
end

--- order(layer_cost, total_cost, left): all SMs (from 0) as the rule puts them; left: how many will take more.
--- placement: { rule, seed } of the schedule, nil for the default.
function M.orderer(placement, sms)
  placement = placement or M.DEFAULT
  local rule, state = rules[placement.rule], { first = 0, below = M.random(placement.seed) }
  return function(layer_cost, total_cost, left) return rule(state, sms, layer_cost, total_cost, left) end
end

return M
