-- The registry of the op files in templates/ops: numbers, fields, roles and waits that follow from their tables.
package.path = "tests/gen/?.lua;" .. package.path
local t = require("helper_emit")
local diags = require("diag")
local ops = require("ops")

local diag = diags.new()
local registry = ops.load(".", diag)

t.case("all op files are good", table.concat(diag:lines(), "\n"), "")

local names, sorted = {}, {}
for i, op in ipairs(registry.list) do
  names[i], sorted[i] = op.opcode .. " " .. op.name, (op.launch == "step" and "1 " or "2 ") .. op.name
end
table.sort(sorted)
for i, name in ipairs(sorted) do
  sorted[i] = i .. name:sub(2)
end
t.case("opcodes follow the names, those of a step first", table.concat(names, ", "), table.concat(sorted, ", "))

local function fields(name)
  local list = {}
  for i, field in ipairs(registry.by_name[name].fields) do
    list[i] = field.word .. " " .. field.name .. (field.buffer and "*" or "")
  end
  return table.concat(list, ", ")
end
t.case("buffers come after the task fields, reads first", fields("combine"),
  "8 first, 9 step, 10 end, 11 sliding, 12 part*, 13 attn*")
t.case("kv, control and SM-local data have no field", fields("qkv"),
  "8 tile, 9 tiles, 10 weight_kib, 11 rope, 12 sliding, 13 kv_layer, 14 bias_kib, 15 gamma_kib, 16 qkv*, 17 squares*")
t.case("a buffer that is read and written has one field per name", fields("residual"), "8 tile, 9 x*, 10 y*, 11 yb*")

local function sync(name)
  local op = registry.by_name[name]
  return ("%s %s %s"):format(op.wait, op.signal, op.arrivals)
end
t.case("stores signal twice, the wait is the consumers'", sync("qkv"), "compute store 2")
t.case("a helper signals once", sync("combine"), "help help 1")
t.case("an op of one role waits there", sync("clear_cuts"), "help help 1")
t.case("control is for later launches: no signal", sync("sample"), "help nil nil")
t.case("an optional op waits and signals as others", sync("cut"), "help help 1")

-- Who merges attention's partials.
local function merges(exchange, sequential)
  t.settle(registry, exchange, sequential)
  local op = registry.by_name.combine
  return ("%s, help %s, compute %s, reads by %s, writes by %s"):format(sync("combine"), op.roles.help, op.roles.compute,
    op.reads[1].role, op.writes[1].role)
end
t.case("in a chain compute takes over from the helper", merges("fenced", true),
  "compute compute 1, help nil, compute true, reads by compute, writes by compute")
t.case("not where words tell that they are there", merges("validated", true),
  "help help 1, help true, compute nil, reads by help, writes by help")
t.case("nor where there is other work", merges("fenced", false),
  "help help 1, help true, compute nil, reads by help, writes by help")

local function eased(exchange, sequential)
  local list = {}
  t.settle(registry, exchange, sequential)
  for _, op in ipairs(registry.list) do list[#list + 1] = op.eased and op.name or nil end
  return table.concat(list, ", ")
end
t.case("what streams eased where layers are a chain", eased("fenced", true), "attention, o_proj, qkv, router")
t.case("what streams eased without fences", eased("validated", true), "qkv, router")
t.case("what streams eased", eased("fenced", false), "qkv, router")

local sleepers, adders = {}, {}
for _, op in ipairs(registry.list) do
  sleepers[#sleepers + 1] = op.optional and op.name or nil
  for _, region in ipairs(op.writes) do
    adders[#adders + 1] = region.adds and op.name .. "." .. region.name or nil
  end
end
t.case("what may sleep", table.concat(sleepers, ", "), "cut, draw")
t.case("what is added to", table.concat(adders, ", "), "cut.cuts, router_sum.logits")
t.case("who adds in compute signals nothing", sync("router_sum"), "compute nil nil")

do
  local region = registry.by_name.combine.writes[1]
  local env = { first = 3, step = 132, ["end"] = 1024 }
  t.case("a field may be named like a word of Lua",
    ("%d %d %d"):format(region.eval.lo(env), region.eval.hi(env), region.eval.step(env)), "3 1024 132")
end

do
  local why, count = t.messages("count", [[
/*@op
  name = "count", summary = "bins += y", optional = true, tile = "every", cost = "0",
  reads = { {"y", "f32", role = "help", lo = "0", hi = "64"} },
  writes = { {"bins", "u64", role = "help", adds = true, lo = "0", hi = "8", step = "2"},
             {"left", role = "help", scope = "sm"} },
@*/
//@device help
body
//@reference
body
]])
  count.opcode = 1
  t.case("an optional op and its additions in the table of nmkgen ops", why .. ops.table({ list = { count } }), [[
1 count: bins += y
  tiles    every
  fields   8 y, 9 bins
  roles    help
  waits    in help
  sleeps   unless a column wants it
  signals  from help, 1 per task
  reads    y[0 .. 64] by help
  writes   bins[0 .. 8 step 2, added to] by help
  writes   left[sm] by help
]])
end

t.case("the table of nmkgen ops", ops.table(t.registry()), [[
1 add: y = a + b
  tiles    spread
  fields   8 tile, 9 tiles, 10 a, 11 y
  params   width, scale
  roles    compute, store
  waits    in compute
  signals  from store, 2 per task
  reads    a[tile*16 .. (tile+tiles)*16] by compute
  writes   y[tile*16 .. (tile+tiles)*16] by store

2 finish: looks at y
  tiles    every
  fields   8 y
  roles    help
  waits    in help
  reads    y[0 .. 64] by help
]])

-- Two op files in a folder of their own.
do
  local folder = t.folder("ops_registry")
  t.run(("mkdir -p %s/templates/ops"):format(folder))
  local function op(name, role, line)
    t.write(("%s/templates/ops/%s.cu"):format(folder, name), ("/*@op\n  name = %q, summary = \"\", tile = \"every\", "
      .. "cost = \"0\",\n%s\n@*/\n//@device %s\nbody\n//@reference\nbody\n"):format(name, line, role))
  end
  op("take", "compute", '  reads = { {"r", role = "compute", scope = "sm"} },')
  op("give", "help", '  wide = "gives", writes = { {"r", role = "help", scope = "sm"} },')
  local lost = diags.new()
  ops.load(folder, lost)
  t.case("an op whose place nobody can take", table.concat(lost:lines(), "\n"),
    "templates/ops/give.cu:1:1: wide: there is no op 'gives'")
  op("give", "help", '  writes = { {"r", role = "help", scope = "sm"} },')
  local good, bad = diags.new(), diags.new()
  ops.load(folder, good)
  t.case("an op leaves something for another role", table.concat(good:lines(), "\n"), "")
  op("give", "help", '  optional = true, writes = { {"r", role = "help", scope = "sm"} },')
  ops.load(folder, bad)
  t.case("an optional op leaves something for another role", table.concat(bad:lines(), "\n"),
    "templates/ops/give.cu:3:33: writes 'r': other roles wait for it, and an optional op may sleep")
end

-- Where the normalised x is.
for _, columns in ipairs({ 8, 16 }) do
  local found = diags.new()
  local region = ops.load(".", found, columns).by_name.qkv.reads[1]
  t.case(("xn of %d columns"):format(columns), ("%s %s %s %s .. %s"):format(#found:lines(), region.name, region.scope,
    region.lo, region.hi), columns == 8 and "0 xn sm nil .. nil" or "0 xn nil 0 .. columns")
end

t.done()
