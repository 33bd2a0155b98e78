-- Serves the tests of the op registry and the emitters: a registry of two small ops, a graph of three nodes on two SMs.
package.path = "gen/?.lua;" .. package.path
dofile("tests/helper_host.lua")

local diags = require("diag")
local ops = require("ops")

local M = {}

local failed = 0

--- One case: got and want are compared as texts.
function M.case(name, got, want)
  got, want = tostring(got), tostring(want)
  if got == want then
    print("ok - " .. name)
    return
  end
  failed = failed + 1
  local line, at = 1, 1
  while at <= #want and got:byte(at) == want:byte(at) do
    line = line + (want:byte(at) == 10 and 1 or 0)
    at = at + 1
  end
  local function line_of(text)
    local n = 0
    for row in (text .. "\n"):gmatch("(.-)\n") do
      n = n + 1
      if n == line then
        return row
      end
    end
    return "(end)"
  end
  print(("not ok - %s: line %d is '%s', expected '%s'"):format(name, line, line_of(got), line_of(want)))
end

function M.done()
  os.exit(failed == 0)
end

--- Messages of one op file given as text.
function M.messages(name, text)
  local diag = diags.new()
  local op = ops.parse(("templates/ops/%s.cu"):format(name), text, diag, function(path)
    local file = assert(io.open(path))
    local pipeline = file:read("a")
    file:close()
    return pipeline
  end)
  return table.concat(diag:lines(), "\n"), op
end

--- Settles a registry as for a model that claims as models do by default.
function M.settle(registry, exchange, sequential)
  ops.settle(registry, { up = "tail", attention = "static" }, exchange, sequential)
end

M.ADD = [[
/*@op
  name    = "add",
  summary = "y = a + b",
  params  = { {"width", "i32"}, {"scale", "f32"} },
  tile    = "spread",
  task    = { {"tile", "i32"}, {"tiles", "i32"} },
  reads   = { {"a", "f32", role = "compute", lo = "tile*16", hi = "(tile+tiles)*16"} },
  writes  = { {"y", "f32", role = "store", lo = "tile*16", hi = "(tile+tiles)*16"} },
  cost    = "tiles*64",
@*/
//@device compute
struct Before { int warm; };
DEVICE Before before(Consumer &c, const Task &t) { return {t.tile}; }
DEVICE void compute(Consumer &c, const Task &t, const Before &b) {}
//@device store
DEVICE void store(Storer &c, const Task &t) { c.buffer<float>(t.y)[t.tile] = P::scale; }
//@reference
float *y = buffer(vm, t.y);
for (int i = t.tile * 16; i < (t.tile + t.tiles) * 16; i++) y[i] = P.scale * P.width;
]]

M.FINISH = [[
/*@op
  name    = "finish",
  summary = "looks at y",
  tile    = "every",
  reads   = { {"y", "f32", role = "help", lo = "0", hi = "64"} },
  cost    = "0",
@*/
//@device help
DEVICE void help(Helper &c, const Task &t) {}
//@reference
(void)buffer(vm, t.y);
]]

function M.registry()
  local registry = { list = {}, by_name = {} }
  for i, text in ipairs({ M.ADD, M.FINISH }) do
    local why, op = M.messages(text:match('name%s*= "(%w+)"'), text)
    assert(why == "", why)
    op.opcode = i
    registry.list[i], registry.by_name[op.name] = op, op
  end
  return registry
end

local FAMILY = {
  values = function()
    return { layers = 1, head_dim = 128, kv_heads = 1, full_layers = 1, sliding_layers = 0, width = 64, scale = 0.5,
      vocab_rows = 64 }
  end,
  rope = function() return { 1.0, 0.1, 1e-3, scale = 1.25 } end,
}

local CONFIG = {
  { path = "model_type", value = "small", required = true },
  { path = "theta", or_path = "rope.theta", value = 50000.0, required = true },
  { path = "kinds", value = { "a", "b" }, required = false },
}

function M.model()
  return {
    name = "small", launch = "step",
    family_module = FAMILY, config = CONFIG, sources = { "specs/small.yaml" }, shape = { width = 64 },
    target = { sms = 2, smem_bytes_per_block = 1024, arch = "sm_90a" },
    schedule = { columns = 8, ring_stages = 4, l2_stages = 0,
      in_flight = { 1, 1, 1, 1, 2, 2, 2, 2 }, split = { chunks_max = 32 },
      claim = { up = "tail", attention = "static" } },
  }
end

--- add on x, finish, add on y: the second add runs before finish on SM 1, so lists are not in node order there.
function M.graph()
  local first = { id = 1, op = "add", layer = 0, name = "layer0.add", counter = 0, fields = {},
    bind = { a = "x", y = "y" } }
  local finish = { id = 2, op = "finish", layer = -1, name = "finish", fields = {}, bind = { y = "y" } }
  local second = { id = 3, op = "add", layer = 1, name = "layer1.add", counter = 1, fields = {},
    bind = { a = "y", y = "y" } }
  for _, node in ipairs({ first, finish, second }) do
    node.first_tile, node.first_pass, node.last_pass = 0, node, node
  end
  local function task(node, sm, fields, waits)
    return { node = node, sm = sm, fields = fields, waits = waits or {}, ["local"] = 0 }
  end
  local function add(node, sm, tile, tiles, waits)
    return task(node, sm, { tile = tile, tiles = tiles }, waits)
  end
  local wait = { { counter = 0, arrivals = 4 } }
  local g = {
    nodes = { first, finish, second },
    buffers = { { name = "x", bytes = 512, extent = 64, offset128 = 0 }, { name = "y", bytes = 512, extent = 64,
      offset128 = 4 } },
    params = { add = { width = 64, scale = 0.5 }, finish = {} },
    arrays = { { name = "w", layer0 = 0, layers = 2, experts = 3, rows = 16, cols = 256, layout = "gate_up", kib = 8,
      layer_kib = 24, expert_kib = 8 } },
    tensors = { { name = "model.%d.%d", layer0 = 0, layers = 2, experts = 3, rows = 8, cols = 256, dims = 2,
      array = "w", row0 = 8 } },
    arena_bytes = 1024, exchange_at = 1024, exchange_bytes = 0,
    weights_kib = 56, counters = 2, tickets = 1, claim_units = 1,
    lists = {
      [0] = { add(first, 0, 0, 2), task(finish, 0, finish.fields, wait), add(second, 0, 0, 2, wait) },
      [1] = { add(first, 1, 2, 2), add(second, 1, 2, 2, wait), task(finish, 1, finish.fields, wait) },
    },
  }
  g.buffer = { x = g.buffers[1], y = g.buffers[2] }
  return g
end

local function read_file(path)
  local file = io.open(path, "rb")
  local text = file and file:read("a")
  if file then
    file:close()
  end
  return text
end

--- What emitters get. templates[path] stands in for the files' texts.
function M.context(templates)
  local encode = require("encode")
  local ctx = { model = M.model(), graph = M.graph(), registry = M.registry(), hash = "0x0123456789abcdefull" }
  ctx.sources = ctx.model.sources
  ctx.read = function(path)
    return templates and templates[path] or read_file(path)
  end
  ctx.words = encode.words(ctx.graph, ctx.registry)
  ctx.words_hash = encode.hash(ctx.words, 2)
  return ctx
end

--- A folder for files of this test, empty.
function M.folder(name)
  local path = "build/tests/" .. name
  os.execute(("rm -rf '%s' && mkdir -p '%s'"):format(path, path))
  return path
end

function M.write(path, text)
  local file = assert(io.open(path, "wb"))
  file:write(text)
  file:close()
end

--- What a command prints, both streams, and whether it succeeded.
function M.run(command)
  local pipe = io.popen("{ " .. command .. "; } 2>&1")
  local text = pipe:read("a")
  return text, pipe:close() == true
end

return M
