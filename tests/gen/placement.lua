-- The placement rules on a machine of 5 SMs.
package.path = "gen/?.lua;" .. package.path
local placement = require("placement")

local failed = false
local function case(name, got, want)
  if got == want then
    print("ok - " .. name)
  else
    failed = true
    print(("not ok - %s: %s, expected %s"):format(name, got, want))
  end
end

local LAYER, TOTAL = { [0] = 4, 2, 2, 0, 4 }, { [0] = 1, 9, 3, 7, 0 }
local function order(rule, seed, calls, left)
  local of, list = placement.orderer(rule and { rule = rule, seed = seed or 0 }, 5), nil
  for _ = 1, calls or 1 do list = of(LAYER, TOTAL, left or 2) end
  return table.concat(list, " ")
end

case("the default", order(nil), "3 2 1 4 0")
case("layer_cost", order("layer_cost"), "3 2 1 4 0")
case("greedy", order("greedy"), "4 0 2 3 1")
case("round_robin begins at 0", order("round_robin"), "0 1 2 3 4")
case("round_robin goes on", order("round_robin", 0, 2), "2 3 4 0 1")
case("round_robin comes round", order("round_robin", 0, 4), "1 2 3 4 0")
case("random is the same for a seed", order("random", 7, 3), order("random", 7, 3))
case("random has its seeds", tostring(order("random", 7) ~= order("random", 8)), "true")
case("random changes from wave to wave", tostring(order("random", 7, 1) ~= order("random", 7, 2)), "true")
local seen = {}
for sm in order("random", 11):gmatch("%d") do seen[sm] = true end
case("random has all SMs", table.concat({ tostring(seen["0"]), tostring(seen["1"]), tostring(seen["2"]),
  tostring(seen["3"]), tostring(seen["4"]) }, " "), "true true true true true")
os.exit(not failed)
