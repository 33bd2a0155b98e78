-- lists: everything about a schedule that a program of the model needs in place of what was built in, in a file beside
-- its kernel, megakernel.cu. runtime/variant.c reads it.
--
--   nmk-lists VERSION
--   KEY VALUE...          one line each, in the order of `text` below
--   words                 then for every SM its number of tasks, then all their words: 32-bit, little-endian
--
-- The last key, head, is the hash of the text before it; words_hash that of the words, kernel that of megakernel.cu.
local abi = require("emit.abi")
local ops = require("ops")
local writer = require("emit.writer")

local M = {}

M.VERSION = 3

local PACK = 256                -- words packed by one call

local function pack(list, parts)
  local format = "<" .. ("i4"):rep(PACK)
  local whole = #list // PACK * PACK
  for i = 1, whole, PACK do parts[#parts + 1] = format:pack(table.unpack(list, i, i + PACK - 1)) end
  if whole < #list then
    parts[#parts + 1] = ("<" .. ("i4"):rep(#list - whole)):pack(table.unpack(list, whole + 1))
  end
end

--- The file's bytes. ctx as in emit/files.lua; kernel: the text of megakernel.cu, with its hash.
function M.text(ctx, kernel)
  local g, schedule, w = ctx.graph, ctx.model.schedule, writer.new("lists")
  w:line("nmk-lists %d", M.VERSION)
  w:line("model %s", ctx.model.name)
  w:line("target %s", ctx.model.target.name)
  w:line("abi 0x%016x", abi.fixed_hash(ctx))
  w:line("hash %s", (ctx.hash:gsub("ull$", "")))
  w:line("kernel 0x%016x", writer.fnv(kernel))
  w:line("words_hash 0x%016x", ctx.words_hash)
  for _, name in ipairs({ "MAX_TASKS", "COUNTERS", "RING_STAGES", "ARENA_BYTES", "EXCHANGE_AT", "EXCHANGE_BYTES",
    "PART_SLOTS" }) do
    w:line("%s %d", name:lower(), abi.constant(ctx, name) or 0)
  end
  w:line("split %d %d %d %d", schedule.split.chunks_min, schedule.split.chunks_max, schedule.split.pages_per_chunk,
    schedule.split.pages_per_long_chunk)
  w:line("own_pages %d", schedule.split.own_pages)
  w:line("in_flight %s", table.concat(schedule.in_flight, " ", 1, schedule.columns))
  w:line("buffers %d", #g.buffers)
  for _, b in ipairs(g.buffers) do w:line("buffer %s %d %d %d", b.name, b.offset128, b.extent, b.bytes) end
  w:line("nodes %d", #g.nodes)
  for _, n in ipairs(g.nodes) do
    w:line("node %s %d %d", n.name, ctx.registry.by_name[n.op].opcode, n.layer)
  end
  for _, name in ipairs(abi.counter_names(g)) do w:line("counter %s", name) end
  local head = w:text()
  local parts, counts = { head, ("head 0x%016x\nwords\n"):format(writer.fnv(head)) }, {}
  for sm = 0, g.sms - 1 do counts[sm + 1] = #ctx.words[sm] // ops.WORDS end
  pack(counts, parts)
  for sm = 0, g.sms - 1 do pack(ctx.words[sm], parts) end
  return table.concat(parts)
end

return M
