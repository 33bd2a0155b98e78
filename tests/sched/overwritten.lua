-- Buffers that are written again: not before the last read or write of what was there.
package.path = "tests/sched/?.lua;" .. package.path
local helper = require("helper")

-- Two ops by turns over one buffer: all SMs fill it, all SMs read all of it.
local FILL = [[/*@op
  name = "fill", summary = "a = something", tile = "spread", cost = "0",
  task = { {"tile", "i32"}, {"tiles", "i32"} },
  writes = { {"a", "f32", role = "store", lo = "tile*4", hi = "(tile+tiles)*4"} },
@*/
//@device store
//@reference
]]
local USE = [[/*@op
  name = "use", summary = "b = f(a)", tile = "every", cost = "0",
  reads = { {"a", "f32", role = "compute", lo = "0", hi = "32"} },
  writes = { {"b", "f32", role = "store", lo = "sm", hi = "sm+1"} },
@*/
//@device compute
//@device store
//@reference
]]
local layers = {}
for i = 1, 3 do layers[i] = { { op = "fill", tiles = 8 }, { op = "use" } } end
local g = assert(helper.custom({ FILL, USE }, layers,
  { { name = "a", bytes = 128, extent = 32 }, { name = "b", bytes = 128, extent = 4 } }, 4))
local words = helper.words(g)
helper.proved("fill and use by turns", g, words)

local b = helper.broken(g, words)
b:lose(2, b:find(2, "layer1.fill"))
helper.refused("a buffer that is filled while it is read", b,
  ("%s writes a without being ordered after layer0.use on SM * (task *), which reads what it overwrites")
    :format(b:name(2, "layer1.fill")))

-- Nobody reads b: its writers still have an order.
local WRITE = [[/*@op
  name = "write", summary = "b = f()", tile = "spread", cost = "0",
  task = { {"tile", "i32"}, {"tiles", "i32"} },
  writes = { {"b", "f32", role = "store", lo = "tile", hi = "tile+tiles"} },
@*/
//@device store
//@reference
]]
local again = assert(helper.custom({ WRITE }, { { { op = "write", tiles = 4 } }, { { op = "write", tiles = 4 } } },
  { { name = "b", bytes = 128, extent = 4 } }, 4))
local again_words = helper.words(again)
helper.proved("two writers of one buffer", again, again_words)
b = helper.broken(again, again_words)
b:lose(3, 1)
helper.refused("a buffer that is written while it is written", b,
  "layer1.write on SM 3 (task 1) writes b without being ordered after layer0.write on SM 3 (task 0), " ..
  "which writes it before")

-- Written by one task and read by another of the same node, which nothing orders.
local SHIFT = [[/*@op
  name = "shift", summary = "a = f(a of the next)", tile = "every", cost = "0",
  reads = { {"a", "f32", role = "%s", lo = "%s", hi = "%s"} },
  writes = { {"a", "f32", role = "store", lo = "sm*8", hi = "sm*8+8"} },
@*/
//@device compute
//@device store
//@reference
]]
local function shifted(...)
  return assert(helper.custom({ FILL, SHIFT:format(...) }, { { { op = "fill", tiles = 8 }, { op = "shift" } } },
    { { name = "a", bytes = 128, extent = 32 } }, 4))
end
local shift = shifted("store", "sm*8+1", "sm*8+9-(sm+1)//4")
helper.refused("a buffer that one node reads and writes", helper.broken(shift, helper.words(shift)),
  "layer0.shift on SM * (task 1) writes a without being ordered with layer0.shift on SM * (task 1), which reads it: " ..
  "nothing orders what is in one node")
local own = shifted("store", "sm*8", "sm*8+8")
helper.proved("a task that reads and writes what is its own", own, helper.words(own))
local early_store = shifted("compute", "sm*8", "sm*8+8")
helper.refused("a store that may come before its task's compute", helper.broken(early_store, helper.words(early_store)),
  "layer0.shift on SM * (task 1) writes a without being ordered with layer0.shift on SM * (task 1), which reads it: " ..
  "nothing orders what is in one node")

-- Read before anybody wrote it.
local early = helper.custom({ FILL, USE }, { { { op = "use" }, { op = "fill", tiles = 8 } } },
  { { name = "a", bytes = 128, extent = 32 }, { name = "b", bytes = 128, extent = 4 } }, 4)
helper.refused("a buffer that is read before it is written", helper.broken(early, helper.words(early)),
  "layer0.use on SM 0 (task 0) reads unit 0 of a, which no earlier task of the step writes")

-- Written only in part.
local part = helper.custom({ FILL, USE }, { { { op = "fill", tiles = 7 }, { op = "use" } } },
  { { name = "a", bytes = 128, extent = 32 }, { name = "b", bytes = 128, extent = 4 } }, 4)
helper.refused("a buffer of which a part is never written", helper.broken(part, helper.words(part)),
  "layer0.use on SM * (task 1) reads unit 28 of a, which no earlier task of the step writes")

-- On the real lists: an SM that enters a layer early writes what the last layer still reads.
local real = helper.build("north-mini-code")
b = helper.broken(real, helper.words(real))
b:lose(131, b:find(131, "layer20.norm"))
helper.refused("qkv of the next layer while attention reads", b, {
  ("%s writes qkv without being ordered after layer19.attention on SM * (task *), which reads what it overwrites")
    :format(b:name(131, "layer20.qkv")),
})
helper.done()
