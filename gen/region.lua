-- Regions of a buffer's index space: lo, lo + step, ... below hi. Compiles the expressions of op files into functions,
-- because they are evaluated a hundred thousand times.
local M = {}

-- What a claimed region may be: any unit, so all of them.
M.ALL = math.maxinteger

--- A function of `arguments` (Lua source, comma-separated) that returns lo, hi, step. resolve(name) gives the Lua
--- source of what a name in an expression stands for.
function M.compile(region, arguments, resolve)
  local function source(expression)
    return (expression:gsub("[%a_][%w_]*", resolve))
  end
  local body
  if region.claim then
    body = ("0, %d, 1"):format(M.ALL)
  else
    body = ("%s, %s, %s"):format(source(region.lo), source(region.hi), source(region.step or "1"))
  end
  return assert(load(("local %s = ... return %s"):format(arguments, body), "=region", "t", {}))
end

--- Units in a region.
function M.count(lo, hi, step)
  return hi > lo and (hi - lo + step - 1) // step or 0
end

--- True where two regions have a unit in common.
function M.overlap(lo_a, hi_a, step_a, lo_b, hi_b, step_b)
  if lo_a >= hi_b or lo_b >= hi_a or lo_a >= hi_a or lo_b >= hi_b then return false end
  if step_a == 1 and step_b == 1 then return true end
  if step_a < step_b then lo_a, hi_a, step_a, lo_b, hi_b, step_b = lo_b, hi_b, step_b, lo_a, hi_a, step_a end
  if step_a == step_b and (lo_a - lo_b) % step_a ~= 0 then return false end
  -- The first unit of a that is not before b, then on in a's steps until one is of b.
  local first = lo_a
  if first < lo_b then first = first + (lo_b - first + step_a - 1) // step_a * step_a end
  for unit = first, math.min(hi_a, hi_b) - 1, step_a do
    if (unit - lo_b) % step_b == 0 then return true end
  end
  return false
end

return M
