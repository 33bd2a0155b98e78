-- Data that tells by itself that it is there: its signals order nothing else, and who breaks its rules is refused.
package.path = "tests/sched/?.lua;" .. package.path
local helper = require("helper")

local VALIDATED = { exchange = "validated" }

-- fill posts a, copy makes b of what it awaits, note writes an ordinary buffer, read reads that.
local function op(name, tile, text, roles)
  local sections = {}
  for _, role in ipairs(roles) do sections[#sections + 1] = "//@device " .. role end
  return ('/*@op name = "%s", summary = "", cost = "0", tile = "%s", %s @*/\n%s\n//@reference\n'):format(name, tile,
    text, table.concat(sections, "\n"))
end
local TASK = 'task = { {"tile", "i32"}, {"tiles", "i32"} },'
local A, B = '"a", "f32", role = "%s", lo = "%s", hi = "%s"%s', '"b", "f32", role = "%s", lo = "%s", hi = "%s"%s'
local C = '"c", "f32", role = "%s", lo = "%s", hi = "%s"%s'
local function fill(posts)
  local a = A:format("store", "tile*4", "(tile+tiles)*4", posts)
  return op("fill", "spread", TASK .. ("writes = { {%s} },"):format(a), { "store" })
end
local function copy(awaits, posts)
  return op("copy", "every", ("reads = { {%s} }, writes = { {%s} },"):format(A:format("compute", "0", "32", awaits),
    B:format("store", "sm", "sm+1", posts)), { "compute", "store" })
end
local NOTE = op("note", "every", ("writes = { {%s} },"):format(C:format("help", "sm", "sm+1", "")), { "help" })
local READ = op("read", "every", ("reads = { {%s} }, writes = { {%s} },"):format(C:format("help", "0", "4", ""),
  B:format("help", "sm", "sm+1", "")), { "help" })
local END = op("finish", "every", ("reads = { {%s} }, writes = { {%s} },"):format(
  B:format("compute", "0", "4", ", awaits = true"), C:format("store", "sm", "sm+1", "")), { "compute", "store" })
local POSTS, AWAITS = ", posts = true", ", awaits = true"
local BUFFERS = {}
for i, name in ipairs({ "a", "b", "c", "d", "e" }) do
  BUFFERS[i] = { name = name, bytes = 128, extent = name == "a" and 32 or 4 }
end
local function graph(texts, nodes, schedule)
  return helper.custom(texts, { nodes }, BUFFERS, 4, schedule or VALIDATED)
end
local CHAIN = { { op = "fill", tiles = 8 }, { op = "copy" }, { op = "finish" } }

local g = assert(graph({ fill(POSTS), copy(AWAITS, POSTS), END }, CHAIN))
local words = helper.words(g)
helper.proved("a chain of posted buffers", g, words)
helper.ok("only nodes that post all they write signal without order", g.registry.by_name.fill.relaxed and
  g.registry.by_name.copy.relaxed and not g.registry.by_name.finish.relaxed, "relaxed differs")
helper.ok("posted buffers have two copies behind the others", g.exchange_at == 128 and g.exchange_bytes == 256 and
  g.arena_bytes == 640 and g.buffer.c_0.offset128 == 0, ("%d, %d, %d"):format(g.exchange_at, g.exchange_bytes,
  g.arena_bytes))

-- The wait is a hint, and must be there all the same: who looks for what nobody has begun may keep it from beginning.
local b = helper.broken(g, words)
b:lose(2, b:find(2, "layer0.copy"))
helper.refused("a reader that does not wait for what it awaits", b,
  ("%s reads a_0 without being ordered after layer0.fill on SM * (task *), which writes it"):format(
    b:name(2, "layer0.copy")))

-- A reader that does not look, a writer that does not post: refused by the graph, and by the proof if it comes so far.
local function messages(texts, nodes)
  local _, list = graph(texts, nodes)
  return table.concat(list or { "accepted" }, " | ")
end
local why = messages({ fill(POSTS), copy("", POSTS), END }, CHAIN)
helper.ok("a reader that does not await is refused", why:find("copy uses buffer a_0 as fill does not, which posts " ..
  "or awaits its words", 1, true), why)
why = messages({ fill(""), copy(AWAITS, POSTS), END }, CHAIN)
helper.ok("a writer that does not post is refused", why:find("fill uses buffer a_0 as copy does not", 1, true), why)
local function region(op_name, way) return g.registry.by_name[op_name][way][1] end
g = assert(graph({ fill(POSTS), copy(AWAITS, POSTS), END }, CHAIN))
words = helper.words(g)
region("copy", "reads").posted = false
helper.refused("a reader that does not look", helper.broken(g, words),
  "layer0.copy reads a_0, whose words tell that they are there, and does not await them")
region("copy", "reads").posted = true
region("fill", "writes").posted = false
helper.refused("a writer that does not post", helper.broken(g, words),
  "layer0.fill writes a_0, whose words must tell that they are there, and posts none")
region("fill", "writes").posted = true
g.buffer.a_0.posted = false
helper.refused("a buffer that is only there once", helper.broken(g, words), {
  "layer0.fill writes a_0, whose words nobody awaits, and posts them",
  "activation arena: buffer a_0 is among those of which there are two copies",
})
g.buffer.a_0.posted = true
g.arena_bytes = g.arena_bytes - 1
helper.refused("a second copy that does not fit", helper.broken(g, words),
  "activation arena: two copies of 256 bytes at byte 128 end behind its 639")
g.arena_bytes = g.arena_bytes + 1
helper.proved("all of it as it was", g, words)

-- A word that is written twice in a step: the second writer's is taken for the first's.
local AGAIN = { op = "fill", tiles = 8 }
g = assert(graph({ fill(POSTS), copy(AWAITS, POSTS), END }, { CHAIN[1], CHAIN[2], CHAIN[3], AGAIN }))
helper.refused("a posted buffer that is written again", helper.broken(g, helper.words(g)),
  "layer0.wave4 on SM * (task *) writes a_0 again, after layer0.fill on SM * (task *): words that tell that they " ..
  "are there are written once a step")

-- An ordinary buffer whose order would come by way of a signal that orders nothing: note's own counter must be waited
-- for, and what only knows of copy's does not do.
local LATE = op("late", "every", ("reads = { {%s}, {%s} }, writes = { {%s} },"):format(
  B:format("compute", "0", "4", AWAITS), C:format("compute", "0", "4", ""),
  '"d", "f32", role = "store", lo = "sm", hi = "sm+1"'), { "compute", "store" })
local BOTH = op("both", "every", ("reads = { {%s} }, writes = { {%s}, {%s} },"):format(
  A:format("compute", "0", "32", AWAITS), B:format("store", "sm", "sm+1", POSTS), C:format("store", "sm", "sm+1", "")),
  { "compute", "store" })
g = assert(graph({ fill(POSTS), BOTH, LATE }, { CHAIN[1], { op = "both" }, { op = "late" } }))
helper.ok("a node that writes something else too signals with order", not g.registry.by_name.both.relaxed, "none")
helper.proved("an ordinary buffer beside a posted one", g, helper.words(g))
g.registry.by_name.both.relaxed = true
helper.refused("an ordinary buffer behind a signal that orders nothing", helper.broken(g, helper.words(g)),
  "layer0.late on SM * (task *) reads c_0 without being ordered after layer0.both on SM * (task *), which writes it*")

-- A wait that is a hint tells nothing of what lies beside the data it is for.
local HINT = op("hint", "every", ("reads = { {%s} }, writes = { {%s} },"):format(B:format("compute", "0", "4", AWAITS),
  '"d", "f32", role = "store", lo = "sm", hi = "sm+1"' .. POSTS), { "compute", "store" })
local BESIDE = op("beside", "every", ("reads = { {%s}, {%s} }, writes = { {%s} },"):format(
  '"d", "f32", role = "compute", lo = "0", hi = "4"' .. AWAITS, C:format("compute", "0", "4", ""),
  '"e", "f32", role = "store", lo = "sm", hi = "sm+1"'), { "compute", "store" })
g = assert(graph({ fill(POSTS), BOTH, HINT, BESIDE },
  { CHAIN[1], { op = "both" }, { op = "hint" }, { op = "beside" } }))
helper.proved("an ordinary buffer behind a wait that is a hint", g, helper.words(g))
b = helper.broken(g, helper.words(g))
local task = b:find(1, "layer0.beside")
helper.ok("it has a wait of its own", b:get(1, task, "wait_a") >= 0 and b:get(1, task, "wait_b") >= 0, "one wait")
for _, wait in ipairs({ "a", "b" }) do                   -- whichever of the two is for d, the other is for c
  if b:get(1, task, "wait_" .. wait) == b:get(1, b:find(1, "layer0.hint"), "wait_a") then
    local other = wait == "a" and "b" or "a"
    b:set(1, task, "wait_a", b:get(1, task, "wait_" .. other))
    b:set(1, task, "arrivals_a", b:get(1, task, "arrivals_" .. other))
    b:set(1, task, "wait_b", -1):set(1, task, "arrivals_b", 0)
    break
  end
end
helper.refused("an ordinary buffer that only a hint speaks of", b,
  ("%s reads c_0 without being ordered after layer0.both on SM * (task *), which writes it"):format(
    b:name(1, "layer0.beside")))

-- Nodes that have nothing to do with any of that.
g = assert(graph({ fill(POSTS), copy(AWAITS, POSTS), NOTE, (READ:gsub('"b"', '"d"')) },
  { { op = "note" }, { op = "read" } }))
helper.proved("ordinary buffers go by counters that order", g, helper.words(g))
b = helper.broken(g, helper.words(g))
b:lose(1, b:find(1, "layer0.read"))
helper.refused("an ordinary buffer without its wait", b,
  ("%s reads c_0 without being ordered after layer0.note on SM * (task *), which writes it"):format(
    b:name(1, "layer0.read")))

-- On real lists.
local real = helper.build("llama-3.2-1b", { schedule = VALIDATED })
words = helper.words(real)
helper.proved("a real model, validated", real, words)
for _, case in ipairs({
  { 131, "layer7.mlp_norm", "xb15", "layer7.residual" }, { 17, "layer3.attention", "qkv_3", "layer3.qkv" },
  { 40, "layer7.combine", "part_7", "layer7.attention" }, { 40, "layer7.o_proj", "attn_7", "layer7.combine" },
  { 3, "layer9.dense_down", "dense_h_9", "layer9.dense_up" },
}) do
  local sm, reader, buffer, writer = table.unpack(case)
  b = helper.broken(real, words)
  b:lose(sm, b:find(sm, reader))
  helper.refused(("%s without its hint, %s"):format(reader, buffer), b,
    ("%s reads %s without being ordered after %s on SM * (task *), which writes it*"):format(b:name(sm, reader),
      buffer, writer))
end
helper.done()
