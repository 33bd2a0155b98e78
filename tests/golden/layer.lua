-- What `plan --svg` draws of a layer whose tasks are given here, against tests/golden/layer.svg.  A schedule that
-- changes leaves it as it is; tests/gen/plan_svg.lua draws real ones.  `make golden` (NMK_GOLDEN=write) rewrites it.
local GOLDEN = "tests/golden/layer.svg"

package.path = "gen/?.lua;" .. package.path
dofile("tests/helper_host.lua")
local read = require("host").read

local function node(name, layer) return { name = name, layer = layer } end
local before, norm, qkv, combine = node("layer0.residual", 0), node("layer1.norm", 1), node("layer1.qkv", 1),
  node("layer1.combine", 1)
-- In us: what each role does of its tasks; `true`: it waits.
local plays = {
  { before, 0, "compute", 0, 2 }, { before, 1, "compute", 0.5, 3 }, { qkv, 0, "load", 0.25, 4.5 },
  { norm, 0, "compute", 2, 3.25, true }, { norm, 0, "compute", 3.25, 4 }, { norm, 1, "compute", 3.5, 4.125 },
  { qkv, 0, "compute", 4, 6 }, { qkv, 0, "compute", 6, 7 }, { qkv, 0, "store", 7, 7.3 }, { qkv, 2, "compute", 4, 12 },
  { combine, 1, "help", 4.125, 8, true }, { combine, 1, "help", 8, 8.5 },
}
local list = {}
for i, p in ipairs(plays) do
  list[i] = { node = p[1], sm = p[2], role = p[3], from = p[4] * 1e-6, to = p[5] * 1e-6, waits = p[6] or false }
end
local g = { sms = 3, model = { name = "a<b&c", shape = { layers = 2 }, target = { name = "h200" } } }
local now = require("draw").svg(g, { layer = 1, batch = 2, context = 1000 }, list, 12.5e-6)

if os.getenv("NMK_GOLDEN") == "write" then
  local file = assert(io.open(GOLDEN, "wb"))
  file:write(now)
  file:close()
  print("wrote " .. GOLDEN)
  os.exit(0)
end
local same = now == read(GOLDEN)
print(same and "ok - golden layer.svg" or "not ok - golden layer.svg: differs (make golden rewrites it)")
os.exit(same)
