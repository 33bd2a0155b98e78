-- Graph, memory and schedule: what is in the step, where it lies, who does it.
package.path = "tests/sched/?.lua;" .. package.path
local helper = require("helper")

local g = helper.build("north-mini-code")

local function equal(name, found, expected)
  helper.ok(name, found == expected, ("%s, expected %s"):format(found, expected))
end

-- Graph.
local names = {}
for _, node in ipairs(g.nodes) do
  if node.layer == 0 or node.layer == 4 or node.layer < 0 then names[#names + 1] = node.name end
end
equal("nodes in the order of waves", table.concat(names, " "), "embed clear_cuts layer0.norm layer0.qkv " ..
  "layer0.attention layer0.combine layer0.dense_up layer0.o_proj layer0.dense_down layer0.residual layer4.norm " ..
  "layer4.router layer4.qkv layer4.route layer4.attention layer4.combine layer4.expert_up layer4.o_proj " ..
  "layer4.expert_down layer4.residual norm lm_head cut cut2 cut3 cut4 cut5 cut6 draw sample")
equal("nodes", #g.nodes, 2 + 9 - 1 + 48 * 10 + 2 + 6 + 2)

local function binds(graph, name)
  for _, node in ipairs(graph.nodes) do
    if node.name == name then return ("%s %s %s"):format(node.bind.y, node.bind.xb, node.bind.yb) end
  end
end
equal("the residual changes places", binds(g, "layer0.residual"), "nil nil xb1")
equal("and back", binds(g, "layer1.residual"), "nil nil xb0")
equal("the last one is normalised", binds(g, "norm"), "nil xb1 nil")
local own = helper.build("north-mini-code", { schedule = { reuse_buffers = false } })
equal("a residual for each layer", binds(own, "layer48.residual"), "nil nil xb49")
equal("buffers with reuse", #g.buffers, 15)
equal("buffers without", #own.buffers, 50 + 49 * 4 + 48 * 2 + 1 + 6)

-- Memory.
local at = 0
for _, buffer in ipairs(g.buffers) do
  if buffer.offset128 * 128 ~= at then helper.ok("buffers in a row", false, buffer.name) end
  at = at + (buffer.bytes + 127) // 128 * 128
end
equal("activation arena", g.arena_bytes, at)
equal("one row tile of qkv, KiB", g.array.qkv.tile_kib, 64)
equal("one expert's up matrix, KiB", g.array.up.expert_kib, 1536 * 2048 * 2 // 1024)
equal("one layer of experts, KiB", g.array.down.layer_kib, 128 * 2048 * 768 * 2 // 1024)
equal("a vector, KiB", g.array.norm.layer_kib, 4)
for _, node in ipairs(g.nodes) do
  if node.name == "layer5.expert_down" then
    equal("weights of layer 5", node.fields.weight_kib, g.array.down.kib + 4 * g.array.down.layer_kib)
  elseif node.name == "norm" then
    equal("the final norm's weights", node.fields.gamma_kib, g.array.norm.kib + 49 * 4)
  end
end
local toy = helper.build("nmc-toy")
equal("96 columns are padded to 256: one row tile, KiB", toy.array.down.tile_kib, 8)

-- Schedule: counts of tiles, per SM.
local function spread(graph, name)
  local least, most, tiles, next_tile = math.huge, 0, 0, 0
  for _, node in ipairs(graph.nodes) do
    if node.name == name then
      for _, task in ipairs(node.tasks) do
        if task.fields.tile ~= next_tile then return ("tile %d comes after %d"):format(task.fields.tile, next_tile) end
        local n = task.fields.tiles
        next_tile = next_tile + n
        least, most, tiles = math.min(least, n), math.max(most, n), tiles + n
      end
      return ("%d tasks, %d to %d, %d tiles"):format(#node.tasks, least, most, tiles)
    end
  end
end
equal("qkv", spread(g, "layer7.qkv"), "132 tasks, 2 to 3, 320 tiles")
equal("router tiles on SMs of their own", spread(g, "layer7.router"), "8 tasks, 1 to 1, 8 tiles")
equal("lm_head", spread(g, "lm_head"), "132 tasks, 124 to 125, 16384 tiles")
equal("toy qkv", spread(toy, "layer1.qkv"), "80 tasks, 1 to 1, 80 tiles")

-- Who has a router tile has no third tile of qkv; who owns no rows comes first among those that get more experts.
local router, ranks, three = {}, {}, 0
for _, node in ipairs(g.nodes) do
  for _, task in ipairs(node.layer == 7 and node.tasks or {}) do
    if node.op == "router" then router[task.sm] = true end
    if node.op == "qkv" and router[task.sm] and task.fields.tiles == 3 then three = three + 1 end
    if node.op == "expert_up" then ranks[task.fields.rank] = task.sm end
  end
end
equal("SMs with a router tile and three of qkv", three, 0)
for rank = 0, 3 do helper.ok(("rank %d owns no rows"):format(rank), ranks[rank] >= 128, ranks[rank]) end

local least, most = math.huge, 0
for sm = 0, 127 do least, most = math.min(least, g.cost[sm]), math.max(most, g.cost[sm]) end
helper.ok("bytes of the SMs that own rows differ by less than 1 %", (most - least) / most < 0.01, (most - least) / most)

local few = helper.build("nmc-toy", { sms = 300 })
local tasks = 0
for sm = 0, 299 do
  for _, task in ipairs(few.lists[sm]) do tasks = tasks + (task.node.name == "layer0.norm" and 1 or 0) end
end
helper.ok("no norm where a layer has no row tile", tasks < 300, tasks)
helper.done()
