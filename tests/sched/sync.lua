-- What sync derives: which node waits for which, and what it cannot do.
package.path = "tests/sched/?.lua;" .. package.path
local helper = require("helper")

local function waits(g, name)
  for _, node in ipairs(g.nodes) do
    if node.name == name then
      local seen, list = {}, {}
      for _, task in ipairs(node.tasks) do
        local names = {}
        for _, wait in ipairs(task.waits) do names[#names + 1] = ("%s:%d"):format(wait.node.name, wait.arrivals) end
        local text = #names > 0 and table.concat(names, "+") or "-"
        if not seen[text] then list[#list + 1] = text end
        seen[text] = true
      end
      return table.concat(list, " or ")
    end
  end
end

-- One wait where data crosses SMs, none elsewhere; all arrivals of the counter.
local g = helper.build("north-mini-code")
for _, case in ipairs({
  { "embed", "-" }, { "clear_cuts", "-" }, { "layer0.norm", "embed:256" }, { "layer0.qkv", "-" },
  { "layer0.dense_up", "-" }, { "layer0.dense_down", "layer0.dense_up:264" }, { "layer5.norm", "layer4.residual:256" },
  { "layer5.router", "-" }, { "layer5.qkv", "-" },
  { "layer5.route", "layer5.router:16" }, { "layer5.attention", "layer5.qkv:264" },
  { "layer5.combine", "layer5.attention:264" }, { "layer5.expert_up", "-" }, { "layer5.o_proj", "layer5.combine:132" },
  { "layer5.expert_down", "layer5.expert_up:264" }, { "layer5.residual", "-" }, { "norm", "layer48.residual:256" },
  { "lm_head", "-" },
  { "cut", "lm_head:264" }, { "cut2", "cut:132" }, { "cut3", "cut2:132" }, { "cut4", "cut3:132" },
  { "cut5", "cut4:132" }, { "cut6", "cut5:132" }, { "draw", "cut6:132" }, { "sample", "draw:132+lm_head:264" },
}) do
  local found = waits(g, case[1])
  helper.ok(case[1] .. " waits for " .. case[2], found == case[2], found)
end
helper.ok("a counter for each node that is waited for", g.counters == 302, g.counters)

local route = { [0] = 0, 0, 0 }
for _, task in ipairs(g.lists[7]) do
  local layer = task.node.layer
  if task.node.op == "route" or task.node.op == "expert_down" then
    route[layer] = (route[layer] == nil or route[layer] == task["local"]) and task["local"]
  end
end
helper.ok("the route of layer 1 is instance 0, of layer 48 instance 47", route[1] == 0 and route[48] == 47, route[48])

-- Ops that ask for what there is no way to give.
local function op(name, roles, text)
  local sections = roles:gsub("%S+%s*", "//@device %0\n"):gsub(" *\n", "\n")
  return ('/*@op name = "%s", summary = "", %s @*/\n%s//@reference\n'):format(name, text, sections)
end
local function refused(name, texts, nodes, expected)
  local buffers = {}
  for _, b in ipairs({ "a", "b", "c", "d" }) do buffers[#buffers + 1] = { name = b, bytes = 128, extent = 4 } end
  local list = {}
  for i, n in ipairs(nodes) do list[i] = { op = n, tiles = 1 } end
  local graph, lines = helper.custom(texts, { list }, buffers, 4)
  local text = graph and "accepted" or table.concat(lines, "\n")
  helper.ok(name, text:find(expected, 1, true), text)
end
-- One tile, which goes to the SM that has least, so that each is on its own SM.
local function writer(name, buffer)
  return op(name, "help", ([[tile = "spread", cost = "tiles", task = { {"tile", "i32"}, {"tiles", "i32"} },
    writes = { {"%s", "f32", role = "help", lo = "0", hi = "4"} },]]):format(buffer))
end
local READ = [[{"%s", "f32", role = "%s", lo = "0", hi = "4"},]]
local WRITE = [[tile = "every", cost = "0", writes = { {"d", "f32", role = "store", lo = "sm", hi = "sm+1"} },]]

refused("an op that would need three waits", {
  writer("wa", "a"), writer("wb", "b"), writer("wc", "c"),
  op("z", "store", WRITE .. "reads = {" .. READ:format("a", "store") .. READ:format("b", "store") ..
    READ:format("c", "store") .. "},"),
}, { "wa", "wb", "wc", "z" }, "layer0.z on SM 0 needs more than 2 waits: layer0.wc, layer0.wb and layer0.wa")

refused("a role that reads before the role that waits", {
  writer("wa", "a"),
  op("z", "compute store", WRITE .. [[wait = "store", reads = {]] .. READ:format("a", "compute") .. "},"),
}, { "wa", "z" }, "layer0.z on SM 0: role compute uses a after layer0.wa, but the op waits in role store")

refused("a reader that nobody hears of is overwritten", {
  writer("wa", "a"), writer("x", "a"), op("r", "compute", [[tile = "every", cost = "0",
    writes = { {"out", role = "compute", launch = "later"} }, reads = {]] .. READ:format("a", "compute") .. "},"),
}, { "wa", "r", "x" }, "layer0.x on SM 1 must come after layer0.r, and no counter says when that is over")

-- Storers of a task that may find nothing to do signal at once, so their counter says nothing of what compute did
-- before. With a tile for everybody, it does.
local function chain(use)
  local peek = op("p", "compute", [[tile = "every", cost = "0", writes = { {"r", role = "compute", scope = "sm"} },
    reads = {]] .. READ:format("a", "compute") .. "},")
  return { writer("wa", "a"), writer("x", "a"), peek, op("z", "compute store", use ..
    [[reads = { {"r", role = "compute", scope = "sm"} },
      writes = { {"d", "f32", role = "store", lo = "sm", hi = "sm+1"} },]]) }
end
refused("a reader before a task that may be idle is overwritten", chain([[tile = "every", cost = "0",]]),
  { "wa", "p", "z", "x" }, "layer0.x on SM 1 must come after layer0.p, and no counter says when that is over")
local tiled = chain([[tile = "owner", cost = "0", task = { {"tile", "i32"} },]])
local buffers = { { name = "a", bytes = 128, extent = 4 }, { name = "d", bytes = 128, extent = 4 } }
local four = assert(helper.custom(tiled, { { { op = "wa", tiles = 1 }, { op = "p" }, { op = "z", tiles = 4 },
  { op = "x", tiles = 1 } } }, buffers, 4))
local found = waits(four, "layer0.x")
helper.ok("a reader before a task that is never idle may be", found == "layer0.z:8", found)

refused("an op that there is not", { writer("wa", "a") }, { "wa", "wb" }, "node layer0.wb: there is no op 'wb'")
helper.done()
