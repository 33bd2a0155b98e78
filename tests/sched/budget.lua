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
  "shared memory: 13 ring stages and the rest need 247936 bytes, a block of the target has 232448")
with("a target with little shared memory", function(g) g.model.target.smem_bytes_per_block = 101376 end,
  "shared memory: 12 ring stages and the rest need 231552 bytes, a block of the target has 101376")
with("more chunks of attention than an SM has room for", function(g) g.model.schedule.split.chunks_max = 512 end,
  "shared memory: 12 ring stages and the rest need 233472 bytes, a block of the target has 232448")
with("a target with few registers", function(g) g.model.target.regs = 32768 end,
  "registers: a block needs 64512, an SM of the target has 32768")
with("buffers that overlap", function(g) g.buffer.logits.bytes = g.buffer.logits.bytes + 1 end,
  "activation arena: buffers logits and qkv overlap")
with("a buffer past the end", function(g) g.arena_bytes = g.arena_bytes - 128 end,
  "activation arena: buffer squares ends at byte 1711392 of 1711360")
with("arrays that overlap", function(g) g.array.o.kib = g.array.o.kib - 1 end,
  "weight arena: array o at KiB * overlaps qkv")
with("an array past the end", function(g) g.weights_kib = g.weights_kib - 1 end,
  "weight arena: array down ends at KiB * of *")

-- Lists longer than a clock can count: sync does not begin, and check says it of lists that others made.
local TICK = [[/*@op
name = "tick", summary = "one word on every SM", tile = "every", task = {}, reads = {},
writes = { {"word", "f32", role = "store", lo = "sm", hi = "sm + 1"} }, cost = "0",
@*/
//@device store
//@reference]]
local function ticks(n)
  local layers = {}
  for i = 1, n do layers[i] = { { op = "tick" } } end
  return helper.custom({ TICK }, layers, { { name = "word", bytes = 512, extent = 2 } }, 2)
end

local _, why = ticks(4096)
helper.ok("sync: a list that is too long", why and #why == 1 and
  why[1]:find("SM 0 has 4096 tasks, a list holds at most 4095", 1, true), why and table.concat(why, "; "))
local longest = assert(ticks(4095))
local words = helper.words(longest)
helper.proved("the longest list", longest, words)
helper.refused("check: a list that is too long", helper.broken(longest, words):repeat_task(1, 4094),
  "SM 1 has 4096 tasks, a list holds at most 4095")
helper.done()
