-- What does not fit: shared memory, registers, arenas.
package.path = "tests/sched/?.lua;" .. package.path
local helper = require("helper")

local function with(name, change, expected)
  local g = helper.build("nmc-toy")
  local words = helper.words(g)
  change(g)
  helper.refused(name, helper.broken(g, words), expected)
end

with("a ring that is too deep", function(g) g.model.schedule.ring_stages = 13 end,
  "shared memory: 13 ring stages and the rest need 248064 bytes, a block of the target has 232448")
with("a target with little shared memory", function(g) g.model.target.smem_bytes_per_block = 101376 end,
  "shared memory: 12 ring stages and the rest need 231680 bytes, a block of the target has 101376")
with("more chunks of attention than an SM has room for", function(g) g.model.schedule.split.chunks_max = 512 end,
  "shared memory: 12 ring stages and the rest need 233600 bytes, a block of the target has 232448")
with("a target with few registers", function(g) g.model.target.regs = 32768 end,
  "registers: a block needs 64512, an SM of the target has 32768")
with("buffers that overlap", function(g) g.buffer.logits.bytes = g.buffer.logits.bytes + 1 end,
  "activation arena: buffers logits and qkv overlap")
with("a buffer past the end", function(g) g.arena_bytes = g.arena_bytes - 128 end,
  "activation arena: buffer tops ends at byte 1719552 of 1719424")
with("arrays that overlap", function(g) g.array.o.kib = g.array.o.kib - 1 end,
  "weight arena: array o at KiB * overlaps qkv")
with("an array past the end", function(g) g.weights_kib = g.weights_kib - 1 end,
  "weight arena: array down ends at KiB * of *")
helper.done()
