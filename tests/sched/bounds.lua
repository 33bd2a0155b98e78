-- Words that point outside, or at something else than the graph says.
package.path = "tests/sched/?.lua;" .. package.path
local helper = require("helper")

local g = helper.build("north-mini-code")
local words = helper.words(g)

local function changed(sm, name, word, value)
  local b = helper.broken(g, words)
  b:set(sm, b:find(sm, name), word, value)
  return b
end

local last = helper.broken(g, words)
local tile = last:get(131, last:find(131, "layer3.qkv"), "tile")
local b = changed(131, "layer3.qkv", "tiles", 9)
helper.refused("a region past the end of its buffer", b, {
  ("%s: region %d to %d of qkv is out of range, which has 5120 units"):format(b:name(131, "layer3.qkv"), tile * 16,
    (tile + 9) * 16 - 1),
  ("%s: tiles %d to %d are out of range, layer3.qkv has 320"):format(b:name(131, "layer3.qkv"), tile, tile + 8),
})

b = changed(0, "layer3.qkv", "tile", -1)
helper.refused("a region before the start of its buffer", b,
  ("%s: region -16 to * of qkv is out of range, which has 5120 units"):format(b:name(0, "layer3.qkv")))

b = changed(5, "layer9.o_proj", "weight_kib", g.weights_kib)
helper.refused("weights past the end of the arena", b,
  ("%s: weights at KiB %d are out of range: array o of layer 9 starts at KiB *"):format(b:name(5, "layer9.o_proj"),
    g.weights_kib))

b = changed(5, "layer9.o_proj", "weight_kib", last:get(5, last:find(5, "layer8.o_proj"), "weight_kib"))
helper.refused("weights of another layer", b,
  ("%s: weights at KiB * are out of range: array o of layer 9 starts at KiB *"):format(b:name(5, "layer9.o_proj")))

b = changed(5, "layer9.residual", "yb", g.buffer.xb1.offset128)
helper.refused("another buffer than the graph's", b,
  ("%s: yb is buffer xb1, the graph says xb0"):format(b:name(5, "layer9.residual")))

b = changed(5, "layer9.residual", "yb", 77)
helper.refused("an offset where no buffer starts", b,
  ("%s: yb is at 77 x 128 bytes, where no buffer starts, the graph says xb0"):format(b:name(5, "layer9.residual")))

b = changed(5, "layer9.attention", "kv_layer", 30)
helper.refused("a constant field that differs", b,
  ("%s: field kv_layer is 30, the graph says *"):format(b:name(5, "layer9.attention")))

b = changed(5, "layer9.o_proj", "tile", 6)
helper.refused("an SM that works on another's rows", b,
  ("%s: tile 6 belongs to SM 6"):format(b:name(5, "layer9.o_proj")))

b = changed(5, "layer9.expert_up", "rank", 500)
helper.refused("a rank that is out of range", b, ("%s: rank 500 is out of range"):format(b:name(5, "layer9.expert_up")))

b = helper.broken(g, words)
b:set(5, b:find(5, "layer9.o_proj"), "node", 6000)
helper.refused("a node that the graph does not have", b,
  "opcode * of node 6000 on SM 5 (task *): the graph has no such node")
helper.done()
