-- What gen/estimate.lua expects of North Mini Code on the H200, against what tests/bench/RESULTS.md says of it.
local t = dofile("tests/gen/helper_spec.lua")

local script = t.write(t.folder .. "/estimate.lua", [[
local diag, host = require("diag").new(), require("host")
local model = require("spec").load("specs/north-mini-code.yaml", diag, { root = host.root, untuned = true })
local registry = require("ops").load(host.root, diag)
local g = require("graph").build(model, registry, diag)
require("memory").assign(g)
require("schedule").run(g, diag)
require("sync").run(g, diag)
diag:stop()
local estimate = require("estimate")
local function ms(batch, context, opts) print((estimate.step(g, batch, context, opts)) * 1e3) end
for _, b in ipairs({ 1, 2, 4, 8 }) do ms(b, 8192) end
ms(1, 65536) ms(8, 65536)
for n = 2, 5 do ms(1, 8192, { in_flight = n }) end
for _, n in ipairs({ 4, 8, 12 }) do ms(1, 8192, { ring_stages = n }) ms(8, 8192, { ring_stages = n }) end
]])
local _, out, err = t.run("build/nmkgen --lua " .. script)
local got = {}
for line in out:gmatch("[%d.]+") do got[#got + 1] = tonumber(line) end
t.case("there are estimates", #got == 16, out .. err)

local function near(name, i, want)
  t.case(name, got[i] and math.abs(got[i] / want - 1) < 0.04, ("%s, measured %.3f"):format(tostring(got[i]), want))
end
near("1 row", 1, 1.831)
near("2 rows", 2, 2.650)
near("4 rows", 3, 4.270)
near("8 rows", 4, 7.040)
near("1 row of 64 Ki tokens", 5, 2.182)
near("8 rows of 64 Ki tokens", 6, 9.787)
near("2 stages in flight", 7, 1.963)
near("4 stages in flight", 9, 1.973)

-- The ranks that were measured.
t.case("3 stages in flight are the best for 1 row", got[8] < got[7] and got[8] < got[9] and got[8] < got[10], out)
t.case("a shallower ring is slower, 1 row", got[11] > got[13] and got[13] > got[15], out)
t.case("a shallower ring is slower, 8 rows", got[12] > got[14] and got[14] > got[16], out)

local status
status, out, err = t.run("build/nmkgen plan --estimate specs/nmc-toy.yaml")
t.case("plan --estimate", status == 0 and out:find("\nEstimated ms a step, 4096 tokens in each row", 1, true),
  out .. err)
status, _, err = t.run("build/nmkgen plan --estimate -t h100 specs/nmc-toy.yaml")
t.case("a target without timing", status == 1 and err == "nmkgen: target h100 records no timing "
  .. "(`timing:` in its file): no estimate\n", err)
t.done()
