-- Owners with more tiles than SMs, and layers that add to the residual twice: what the nodes are called, which buffers
-- and counters they share, and what the proof refuses.
package.path = "tests/sched/?.lua;" .. package.path
local helper = require("helper")
local machine = require("helper_machine")

-- Dense layers, one addition after the other.
local function sequential(family)
  local changed = { residuals = 2 }
  changed.waves = { { "norm" }, { "qkv" }, { "attention" }, { "combine" }, { "o_proj" }, { "residual" }, { "mlp_norm" },
    { "up" }, { "down" }, { "mlp_residual" } }
  function changed.block(i, m)
    local block = family.block(i, m)
    block.mlp_norm = { op = "norm", residual = 1, weights = block.norm.weights }
    block.mlp_residual = { op = "residual", residual = 1, tiles = block.residual.tiles }
    return block
  end
  return setmetatable(changed, { __index = family })
end

-- Seven tiles of owners on three SMs.
local g = helper.build("nmc-toy", {
  sms = 3, family = sequential,
  shape = { layers = 3, dense_layers = 3, hidden = 112, heads = 2, kv_heads = 1, head_dim = 16, dense_ff = 16,
            experts = 16, experts_per_token = 2, expert_ff = 16, vocab = 64 },
  schedule = { columns = 2, split = { chunks_max = 4 } },
})
local words = helper.words(g)
local node = {}
for _, n in ipairs(g.nodes) do node[n.name] = n end

local names = {}
for _, n in ipairs(g.nodes) do names[#names + 1] = n.layer == 1 and n.name:gsub("^layer1%.", "") or nil end
local want = "norm qkv attention combine o_proj residual o_proj.2 residual.2 o_proj.3 residual.3 mlp_norm dense_up " ..
  "dense_down mlp_residual dense_down.2 mlp_residual.2 dense_down.3 mlp_residual.3"
helper.ok("nodes of a layer", table.concat(names, " ") == want, table.concat(names, " "))

local x = {}
for _, name in ipairs({ "layer0.norm", "layer0.mlp_norm", "layer2.norm", "norm" }) do x[#x + 1] = node[name].bind.xb end
helper.ok("each addition turns the residual's buffers", table.concat(x, " ") == "xb0 xb1 xb0 xb0", table.concat(x, " "))
local one = node["layer1.mlp_residual.2"]
helper.ok("a pass adds to the same residual", one.bind.x == "x1" and one.bind.y == "x0" and one.bind.yb == "xb0",
  one.bind.x .. one.bind.y .. one.bind.yb)

local function waits(name, sm)
  local list = {}
  for _, task in ipairs(node[name].tasks) do
    for _, wait in ipairs((not sm or task.sm == sm) and #list == 0 and task.waits or {}) do
      list[#list + 1] = ("%s:%d"):format(wait.node.name, wait.arrivals)
    end
  end
  return table.concat(list, " ")
end
helper.ok("one counter for all passes", waits("layer1.mlp_norm") == "layer1.residual.3:14", waits("layer1.mlp_norm"))
helper.ok("a pass waits for what the first one has waited for", waits("layer1.o_proj.2", 1) == "" and
  waits("layer1.o_proj", 1) == "layer1.combine:2", waits("layer1.o_proj", 1))
local tiles = {}
for _, task in ipairs(node["layer1.residual.3"].tasks) do tiles[#tiles + 1] = task.sm .. ":" .. task.fields.tile end
helper.ok("the last pass has what is left", table.concat(tiles, " ") == "0:6", table.concat(tiles, " "))

helper.proved("passes and two additions", g, words)
local m, wrong = machine.new(g, words), nil
for i = 1, 200 do wrong = wrong or machine.run(m, i % 2 == 0) end
helper.ok("200 random runs", not wrong, wrong)

local b = helper.broken(g, words)
b:set(0, b:find(0, "layer1.residual.3"), "signal", -1)
helper.refused("a pass that does not signal", b, "layer1.mlp_norm on SM * which can never be met: it gets 12*")
b = helper.broken(g, words)
b:set(1, b:find(1, "layer1.residual.2"), "tile", 1)
helper.refused("a tile of another pass", b,
  ("%s: tiles 1 to 1 are out of range, layer1.residual.2 has 6"):format(b:name(1, "layer1.residual.2")))
b = helper.broken(g, words)
b:remove(2, b:find(2, "layer1.residual.2"))
helper.refused("a tile of a pass that nobody does", b, "layer1.residual.2: tiles 5 to 5 are in no list")
b = helper.broken(g, words)
b:swap(0, b:find(0, "layer1.residual"), b:find(0, "layer1.o_proj.2"))
helper.refused("passes that mix in the registers", b, "* reads acc as layer1.o_proj* left it, the graph says *")
b = helper.broken(g, words)
b:set(0, b:find(0, "layer1.residual.2"), "signal", node["layer1.qkv"].counter)
helper.refused("a pass on another node's counter", b,
  "* which belongs to *: a counter has one node or the passes of one")
b = helper.broken(g, words)
b:set(0, b:find(0, "layer1.mlp_norm"), "xb", g.buffer.xb0.offset128)
helper.refused("the residual of another addition", b, "*: xb is buffer xb0, the graph says xb1")
helper.done()
