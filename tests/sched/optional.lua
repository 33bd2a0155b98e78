-- Optional tasks: asleep they signal without having waited, so nobody else may rely on what they waited for or wrote.
-- And additions: tasks of one node may add to the same unit, nobody may look before all have.
package.path = "tests/sched/?.lua;" .. package.path
local helper = require("helper")
local machine = require("helper_machine")

math.randomseed(3)

-- An op of one role, with one tile or a task on every SM; `access` as in an op file. What stores do the helper of their
-- SM knows nothing of, so that its signals do not tell of them.
local function op(name, tile, access, optional)
  return ([[/*@op name = "%s", summary = "", cost = "0", %s %s %s @*/
//@device %s
//@reference
]]):format(name, optional and "optional = true," or "", tile == "every" and 'tile = "every",' or
    'tile = "spread", task = { {"tile", "i32"}, {"tiles", "i32"} },', access, access:match('role = "(%l+)"'))
end

local OWN_C = '{"c", "f32", role = "help", lo = "sm", hi = "sm+1"}'
local A, B = '"a", "f32", role = "help", lo = "0", hi = "4"', '"b", "f32", role = "help", lo = "sm", hi = "sm+1"'
local ALL_B = '"b", "f32", role = "help", lo = "0", hi = "4"'
local ADDS = 'adds = true, '
local CLEAR = op("clear", "spread", 'writes = { {"a", "f32", role = "store", lo = "0", hi = "4"} },')
local ADD = op("add", "every", ("writes = { {%s%s} },"):format(ADDS, A))
local LOOK = op("look", "every", ("reads = { {%s} }, writes = { {%s} },"):format(A, B))

-- The graph of one layer with those nodes, on four SMs. "name" is a node with a task on every SM, "name/1" has a tile.
local function graph(texts, nodes)
  local buffers, list = {}, {}
  for _, name in ipairs({ "a", "b", "c" }) do buffers[#buffers + 1] = { name = name, bytes = 128, extent = 4 } end
  for i, node in ipairs(nodes) do
    local name, tiles = node:match("^(%w+)/?(%d*)$")
    list[i] = { op = name, tiles = tonumber(tiles) }
  end
  return helper.custom(texts, { list }, buffers, 4)
end

local function task_of(g, name, sm)
  for _, task in ipairs(g.lists[sm]) do
    if task.node.name == name then return task end
  end
end

local function waits(g, name, sm)
  local names = {}
  for _, wait in ipairs(task_of(g, name, sm).waits) do
    names[#names + 1] = ("%s:%d"):format(wait.node.name, wait.arrivals)
  end
  return #names > 0 and table.concat(names, "+") or "-"
end

local function equal(name, found, expected)
  helper.ok(name, found == expected, ("%s, expected %s"):format(found, expected))
end

-- Takes the wait of `name` for a node away on one SM.
local function without(g, name, sm, from)
  local b = helper.broken(g, helper.words(g))
  local task, n = b:find(sm, name), 0
  for i, wait in ipairs(task_of(g, name, sm).waits) do
    if wait.node.name == from then
      n = n + 1
      if i == 1 then                                    -- who finds no first wait does not look for a second
        b:set(sm, task, "wait_a", b:get(sm, task, "wait_b")):set(sm, task, "arrivals_a", b:get(sm, task, "arrivals_b"))
      end
      b:set(sm, task, "wait_b", -1):set(sm, task, "arrivals_b", 0)
    end
  end
  assert(n == 1, "no such wait")
  return b
end

-- The random machine must see the lists go wrong with optional tasks asleep, and never with them awake.
local function wrong_asleep(name, b)
  local m, seen = machine.new(b.g, b.words), { [true] = 0, [false] = 0 }
  for i = 1, 400 do
    local asleep = i % 2 == 0
    if machine.run(m, asleep) then seen[asleep] = seen[asleep] + 1 end
  end
  helper.ok(name .. ": goes wrong asleep alone", seen[true] > 0 and seen[false] == 0,
    ("%d of 200 runs asleep, %d awake"):format(seen[true], seen[false]))
end

-- Additions.
do
  local g = assert(graph({ CLEAR, ADD, LOOK }, { "clear/1", "add", "look" }))
  helper.proved("four tasks add to the same units", g, helper.words(g))
  equal("who adds waits for who clears", waits(g, "layer0.add", 2), "layer0.clear:2")
  equal("who looks waits for all that add", waits(g, "layer0.look", 2), "layer0.add:4")
  helper.refused("a reader that is not ordered after who adds", without(g, "layer0.look", 2, "layer0.add"),
    "layer0.look on SM 2 (task *) reads a without being ordered after layer0.add on SM * (task *), which writes it")
  helper.refused("an addition before the unit is cleared", without(g, "layer0.add", 2, "layer0.clear"),
    "layer0.add on SM 2 (task *) writes a without being ordered after layer0.clear on SM * (task *), which " ..
    "writes it before")
end
do
  local write = op("add", "every", ("writes = { {%s} },"):format(A))
  local g = assert(graph({ CLEAR, write, LOOK }, { "clear/1", "add", "look" }))
  helper.refused("two tasks of a node that write the same unit", helper.broken(g, helper.words(g)),
    "double arrival: layer0.add on SM 0 (task *) and layer0.add on SM 1 (task *) both write unit 0 of a")
  local both = op("add", "every", ('writes = { {%s%s}, {"a", "f32", role = "help", lo = "sm", hi = "sm+1"} },')
    :format(ADDS, A))
  g = assert(graph({ CLEAR, both, LOOK }, { "clear/1", "add", "look" }))
  helper.refused("a node that adds and writes", helper.broken(g, helper.words(g)),
    "layer0.add on SM * (task *) writes a without being ordered with layer0.add on SM * (task *), which writes it: " ..
    "nothing orders what is in one node")
  local peek = op("add", "every", ('reads = { {"a", "f32", role = "help", lo = "sm", hi = "sm+1"} }, ' ..
    "writes = { {%s%s} },"):format(ADDS, A))
  g = assert(graph({ CLEAR, peek, LOOK }, { "clear/1", "add", "look" }))
  helper.refused("a node that adds and reads", helper.broken(g, helper.words(g)),
    "layer0.add on SM * (task *) writes a without being ordered with layer0.add on SM * (task *), which reads it: " ..
    "nothing orders what is in one node")
  g = assert(graph({ ADD, LOOK }, { "add", "look" }))
  helper.refused("additions to what nobody cleared", helper.broken(g, helper.words(g)),
    "layer0.add on SM 0 (task 0) adds to unit 0 of a, which no earlier task of the step writes")
end

-- What an optional task waited for it keeps to itself.
local MAYBE = op("maybe", "every", ("reads = { {%s} }, writes = { {%s} },"):format(A, B), true)
do
  local g = assert(graph({ CLEAR, MAYBE, op("next", "every", ("reads = { {%s} }, writes = { %s },"):format(A, OWN_C)) },
    { "clear/1", "maybe", "next" }))
  helper.proved("a task behind an optional one on its SM", g, helper.words(g))
  equal("an optional task waits", waits(g, "layer0.maybe", 2), "layer0.clear:2")
  equal("who comes behind it waits for itself", waits(g, "layer0.next", 2), "layer0.clear:2")
  wrong_asleep("a task that relies on the wait of an optional one", without(g, "layer0.next", 2, "layer0.clear"))
  helper.refused("a task that relies on the wait of an optional one", without(g, "layer0.next", 2, "layer0.clear"),
    "layer0.next on SM 2 (task *) reads a without being ordered after layer0.clear on SM * (task *), which writes it")
end
do
  local read = op("next", "every", ("reads = { {%s}, {%s} }, writes = { %s },"):format(A, ALL_B, OWN_C))
  local g = assert(graph({ CLEAR, MAYBE, read }, { "clear/1", "maybe", "next" }))
  helper.proved("a task behind optional ones of all SMs", g, helper.words(g))
  equal("their counter says that they are over, not what they waited for", waits(g, "layer0.next", 2),
    "layer0.maybe:4+layer0.clear:2")
  wrong_asleep("a task that relies on a counter of optional ones", without(g, "layer0.next", 2, "layer0.clear"))
  helper.refused("a task that relies on what a counter of optional ones does not say",
    without(g, "layer0.next", 2, "layer0.clear"),
    "layer0.next on SM 2 (task *) reads a without being ordered after layer0.clear on SM * (task *), which writes it")
  helper.refused("a task that does not wait for optional ones", without(g, "layer0.next", 2, "layer0.maybe"),
    "layer0.next on SM 2 (task *) reads b without being ordered after layer0.maybe on SM * (task *), which writes it")
end
do
  local chain = op("next", "every", ("reads = { {%s} }, writes = { %s },"):format(A, OWN_C), true)
  local g = assert(graph({ CLEAR, MAYBE, chain }, { "clear/1", "maybe", "next" }))
  helper.proved("two optional tasks by turns", g, helper.words(g))
  equal("an optional task keeps what those before it waited for", waits(g, "layer0.next", 2), "-")
  local b = without(g, "layer0.maybe", 2, "layer0.clear")
  helper.refused("and loses it with them", b, {
    "layer0.maybe on SM 2 (task *) reads a without being ordered after layer0.clear on SM * (task *), which writes it",
    "layer0.next on SM 2 (task *) reads a without being ordered after layer0.clear on SM * (task *), which writes it",
  })
  local plain = op("plain", "every", ("reads = { {%s} }, writes = { {%s} },"):format(A, B))
  g = assert(graph({ CLEAR, plain, chain }, { "clear/1", "plain", "next" }))
  helper.proved("an optional task behind one that is not", g, helper.words(g))
  equal("it knows what that waited for", waits(g, "layer0.next", 2), "-")
end
do
  local make = op("make", "every", ('reads = { {%s} }, writes = { {"r", role = "compute", scope = "sm"} },')
    :format((A:gsub("help", "compute"))))
  local use = op("maybe", "every", ('reads = { {"r", role = "help", scope = "sm"} }, writes = { {%s} },'):format(B),
    true)
  local read = op("next", "every", ("reads = { {%s} }, writes = { %s },"):format(A, OWN_C))
  local g = assert(graph({ CLEAR, make, use, read }, { "clear/1", "make", "maybe", "next" }))
  helper.proved("an optional task that reads what another role left on its SM", g, helper.words(g))
  equal("what it learns from that it keeps to itself", waits(g, "layer0.next", 2), "layer0.clear:2")
  helper.refused("a task that relies on it", without(g, "layer0.next", 2, "layer0.clear"),
    "layer0.next on SM 2 (task *) reads a without being ordered after layer0.clear on SM * (task *), which writes it")
end

-- Asleep an optional task leaves a buffer as it was, so who reads it comes after those before it too.
do
  local over = op("over", "spread", ('reads = { {%s} }, writes = { {"c", "f32", role = "help", lo = "0", hi = "4"} },')
    :format(A), true)
  local fill = op("fill", "spread", 'writes = { {"c", "f32", role = "store", lo = "0", hi = "4"} },')
  local read = op("next", "every", ('reads = { {"c", "f32", role = "help", lo = "0", hi = "4"} }, writes = { {%s} },')
    :format(B))
  local g = assert(graph({ CLEAR, fill, over, read }, { "clear/1", "fill/1", "over/1", "next" }))
  helper.proved("a buffer that an optional task may write again", g, helper.words(g))
  local sm = 3
  equal("its reader waits for both", waits(g, "layer0.next", sm), "layer0.over:1+layer0.fill:2")
  wrong_asleep("its reader waits for the optional task alone", without(g, "layer0.next", sm, "layer0.fill"))
  helper.refused("its reader waits for the optional task alone", without(g, "layer0.next", sm, "layer0.fill"),
    "layer0.next on SM 3 (task *) reads c without being ordered after layer0.fill on SM * (task *), which writes it")
end
helper.done()
