-- Mistakes in op files: what each is answered with.
package.path = "tests/gen/?.lua;" .. package.path
local t = require("helper_emit")

-- The op `add`, changed: pairs of what stands in it (plain text) and what replaces it.
local function changed(...)
  local text = t.ADD
  local changes = { ... }
  for i = 1, #changes, 2 do
    local from, to = text:find(changes[i], 1, true)
    assert(from, changes[i])
    text = text:sub(1, from - 1) .. changes[i + 1] .. text:sub(to + 1)
  end
  return text
end

local function refuses(name, want, ...)
  t.case(name, (t.messages("add", changed(...))), want)
end

local AT = "templates/ops/add.cu:"

t.case("a good op", (t.messages("add", t.ADD)), "")

-- The table as a whole.
refuses("no table", AT .. "1:1: no /*@op ... @*/ table", "/*@op", "/*")
refuses("open table", AT .. "1:1: the /*@op table is not closed by @*/", "@*/", "*/")
refuses("Lua syntax keeps the file's line", AT .. "5:1: '}' expected (to close '{' at line 1) near 'tile'",
  '{"scale", "f32"} },', '{"scale", "f32"} }')
refuses("no names are known in the table", AT .. "9:1: attempt to call a nil value (global 'tostring')", '"tiles*64"',
  "tostring(64)")
refuses("a table without end", AT .. "9:1: the table takes too long", '"tiles*64"',
  "(function() while true do end end)()")
refuses("name differs", AT .. "2:3: name 'sum' differs from the file's name", '"add"', '"sum"')

-- Keys and values.
refuses("in_chain beside other roles",
  AT .. '9:3: in_chain: expected "compute", with sections //@device compute and //@device help and no other', "cost ",
  'in_chain = "compute", cost ')
do
  local file = assert(io.open("templates/ops/combine.cu"))
  local text = file:read("a"):gsub("  in_chain", "  optional = true,\n  in_chain", 1)
  file:close()
  t.case("in_chain and optional: compute does not sleep", (t.messages("combine", text)),
    "templates/ops/combine.cu:6:3: optional: only an op whose one role is help can sleep\n" ..
    "templates/ops/combine.cu:10:18: writes 'attn': who may sleep cannot post it")
end
refuses("unknown key", AT .. "9:3: op: unknown key 'costs', did you mean 'cost'?", "cost  ", "costs ")
refuses("missing key", AT .. "1:6: op: 'summary' is missing", '  summary = "y = a + b",', "")
refuses("wrong type", AT .. "9:3: op: 'cost' must be a string, not integer", '"tiles*64"', "64")
refuses("wrong type of a switch", AT .. "9:3: op: 'eased' must be a boolean, not string", "cost ",
  'eased = "no", cost ')
do
  local why, eased = t.messages("add", changed("cost ", "eased = true, cost "))
  local _, plain = t.messages("add", t.ADD)
  t.case("an op may stream eased", ("%s%s %s"):format(why, eased.eased, plain.eased), "true false")
end
refuses("stray entry", AT .. "1:6: op: unexpected entry spread", 'tile    = "spread"', '"spread", tile = "spread"')
refuses("unknown tile", AT .. "5:3: tile 'spred' is not one of columns, cyclic, every, owner, spread", '"spread"',
  '"spred"')
refuses("tile without its field", AT .. "5:3: tile = \"spread\" needs the task field 'tiles'", '{"tiles", "i32"}',
  '{"count", "i32"}', "(tile+tiles)", "(tile+count)", "(tile+tiles)", "(tile+count)", '"tiles*64"', '"count*64"')
refuses("unknown pipeline", AT .. "9:3: unknown pipeline 'gemm_y', did you mean 'gemm_x'?", "cost ",
  'pipeline = "gemm_y", cost ')
refuses("unknown claim", AT .. [[9:3: claim 'ticket': neither "queue" nor "schedule" nor "chunk"]], "cost ",
  'claim = "ticket", cost ')
refuses("a claim without a key", AT .. '9:3: claim "schedule": no parameter claim_KEY says by which of its keys',
  "cost ", 'claim = "schedule", cost ')
refuses("a wrong type of optional", AT .. "9:3: op: 'optional' must be a boolean, not integer", "cost ",
  "optional = 1, cost ")
refuses("an op of other roles cannot sleep", AT .. "9:3: optional: only an op whose one role is help can sleep",
  "cost ", "optional = true, cost ")
refuses("nor one that has such a role too", AT .. "9:3: optional: only an op whose one role is help can sleep", "cost ",
  "optional = true, cost ", "//@device compute", "//@device help\nDEVICE void help(Helper &c, const Task &t) {}\n" ..
  "//@device compute")
do
  local finish = t.FINISH:gsub("cost ", "optional = true, cost ")
  local why, op = t.messages("finish", finish)
  local _, plain = t.messages("finish", t.FINISH)
  t.case("an op of the helper may sleep", ("%s%s %s"):format(why, op.optional, plain.optional), "true false")
end

-- Fields.
refuses("field twice", AT .. "6:17: task 'tile': the name is already used by task", '{"tiles", "i32"}',
  '{"tiles", "i32"}, {"tile", "i32"}')
refuses("field like a param", AT .. "6:52: task 'width': the name is already used by params", '{"tiles", "i32"}',
  '{"tiles", "i32"}, {"width", "i32"}')
refuses("field like an ambient name", AT .. "6:52: task 'sm': the name is already used by nmkgen", '{"tiles", "i32"}',
  '{"tiles", "i32"}, {"sm", "i32"}')
refuses("field like a buffer", AT .. "7:17: buffer 'a': the name is already used by task", '{"tiles", "i32"}',
  '{"tiles", "i32"}, {"a", "i32"}')
refuses("field type", AT .. "6:17: task 'tile': type i64 is not one of f32, i32", '{"tile", "i32"}', '{"tile", "i64"}')
refuses("not a field", AT .. "6:3: task entry 2: expected { \"name\", \"type\" } with a lower-case name",
  '{"tiles", "i32"}', '{"Tiles", "i32"}, {"tiles", "i32"}')
do
  local many = {}
  for i = 1, 21 do
    many[i] = ('{"f%d", "i32"}'):format(i)
  end
  refuses("too many fields", AT .. "6:3: 25 descriptor fields (task fields and buffers), but there is room for 24",
    '{"tiles", "i32"}', '{"tiles", "i32"}, ' .. table.concat(many, ", "))
end

-- Regions.
refuses("unknown name in an expression",
  AT .. "7:52: reads 'a' lo: \"tiel*16\": unknown name 'tiel', did you mean 'tile'?",
  'lo = "tile*16"', 'lo = "tiel*16"')
refuses("expression that is none", AT .. "9:14: cost: \"tiles*\": unexpected symbol near <eof>", '"tiles*64"',
  '"tiles*"')
for _, expression in ipairs({
  "f{tiles}", "tiles (2)", "(tiles)(2)", "tiles/2", "tiles///2", "tiles--1", "tiles*1e3", "0x10*tiles", " ",
}) do
  refuses("expression " .. expression, AT .. ('9:14: cost: "%s": only names, whole numbers, + - * // %% and '
    .. "parentheses are allowed"):format(expression), '"tiles*64"', ('"%s"'):format(expression))
end
refuses("float param in an expression",
  AT .. "9:14: cost: \"tiles*scale\": unknown name 'scale', known are: width, tile, tiles, sm, sms, columns",
  '"tiles*64"', '"tiles*scale"')
refuses("role that the op lacks", AT .. "7:17: reads 'a': the op has no role 'help'", 'role = "compute"',
  'role = "help"')
refuses("unknown role", AT .. "7:36: reads 'a': role 'computes' is not one of load, compute, store, help",
  'role = "compute"', 'role = "computes"')
refuses("region without bounds", AT .. "7:16: reads 'a': 'lo' is missing", ', lo = "tile*16"', "")
refuses("region without type", AT .. "7:17: reads 'a': a buffer in global memory needs a type", '"a", "f32"', '"a"')
refuses("data type",
  AT .. "7:22: reads 'a': type 'f16' is not one of bf16, f32, i32, number, u64", '"a", "f32"', '"a", "f16"')
refuses("load reads this step's data",
  AT .. "7:17: reads 'a': bulk copies may read only data older than the launch", 'role = "compute"', 'role = "load"',
  "//@device compute", "//@device load\nDEVICE void load(Loader &c, const Task &t) {}\n//@device compute")
refuses("compute writes global memory", AT .. "8:17: writes 'y': only help or store may write global memory",
  'role = "store"', 'role = "compute"')
t.case("but may add there", (t.messages("add", changed('role = "store"', 'role = "compute", adds = true'))), "")
refuses("two roles write",
  AT .. "8:87: writes 'z': by role help, but another buffer is written by store; one role must write all",
  'hi = "(tile+tiles)*16"} },\n  cost',
  'hi = "(tile+tiles)*16"}, {"z", "f32", role = "help", lo = "0", hi = "1"} },\n  cost',
  "//@reference", "//@device help\nDEVICE void help(Helper &c, const Task &t) {}\n//@reference")
refuses("reads later launches", AT .. "7:56: reads 'a': launch 'later' is not one of older", 'lo = "tile*16"',
  'launch = "later", lo = "tile*16"')
refuses("reads what is claimed", AT .. "7:17: reads 'a': only what is written can be claimed", 'lo = "tile*16"',
  'claim = true, lo = "tile*16"')
refuses("reads what is added to", AT .. "7:17: reads 'a': only what is written can be added to", 'lo = "tile*16"',
  'adds = true, lo = "tile*16"')
refuses("returns what is not its SM's", AT .. "7:17: reads 'a': only what is read on the SM is returned",
  'lo = "tile*16"', 'returns = true, lo = "tile*16"')
refuses("a switch of a region of a wrong type", AT .. "8:44: writes 'y': 'adds' must be a boolean, not string",
  'role = "store", lo', 'role = "store", adds = "yes", lo')
do
  local why, op = t.messages("add", changed('role = "store", lo', 'role = "store", adds = true, lo'))
  t.case("a region that is added to", ("%s%s %s"):format(why, op.writes[1].adds, op.reads[1].adds), "true nil")
end
refuses("unknown key of a region", AT .. "7:46: reads 'a': unknown key 'low', did you mean 'lo'?", 'lo = "tile*16"',
  'low = "tile*16"')

-- Sections.
refuses("unknown section", AT .. "8:17: writes 'y': the op has no role 'store'\n" ..
  AT .. "15:1: unknown section '//@devise store'; expected //@device ROLE, //@reference or //@test NAME",
  "//@device store", "//@devise store")
refuses("unknown device role", AT .. "8:17: writes 'y': the op has no role 'store'\n" ..
  AT .. "15:1: //@device: unknown role 'stoer', did you mean 'store'?", "//@device store", "//@device stoer")
refuses("section twice", AT .. "15:1: a second //@device compute", "//@device store",
  "//@device compute\n//@device store")
refuses("reference twice", AT .. "19:1: a second //@reference", "float *y = buffer(vm, t.y);",
  "float *y = buffer(vm, t.y);\n//@reference")
refuses("no reference", AT .. "1:6: no //@reference section", "//@reference\n", "")
refuses("text before the sections", AT .. "11:1: text before the first section", "@*/\n", "@*/\nint stray;\n")
refuses("empty section", AT .. "15:1: //@device store is empty",
  "DEVICE void store(Storer &c, const Task &t) { c.buffer<float>(t.y)[t.tile] = P::scale; }\n", "\n")
refuses("variant alone", AT .. "1:6: //@device store has variants but no section without one", "//@device store",
  "//@device store sm90")
refuses("waits in a role it lacks",
  AT .. "9:3: wait = \"help\": expected one of the op's roles among compute, help, store",
  "cost ", 'wait = "help", cost ')

-- Tests, and ops that are a function of one number.
refuses("a test without a name", AT .. "19:1: //@test: say in a few words what is tested: //@test tolerance=1e-5 NAME",
  "float *y = buffer(vm, t.y);", "float *y = buffer(vm, t.y);\n//@test tolerance=1e-3\n;")
refuses("a tolerance that is none", AT .. "19:1: //@test: tolerance '1e-3x' is not a number from 0 to 1",
  "float *y = buffer(vm, t.y);", "float *y = buffer(vm, t.y);\n//@test tolerance=1e-3x adds\n;")
refuses("an empty test", AT .. "17:1: //@test 'adds up' is empty",
  "//@reference", "//@test adds up\n//@reference")
refuses("inline in an op with tasks of its own", AT .. '15:1: //@device inline needs pipeline = "elementwise"',
  "//@device store", "//@device inline\nfloat f;\n//@device store")
refuses("a point without a type", AT .. '9:3: points entry 1: expected { "name", "f32" } with a lower-case name',
  "cost ", 'points = { {"here"} }, cost ')
refuses("try without a value", AT .. "9:3: try: 'value' is missing", "cost ", "try = { with = { scale = 1 } }, cost ")
refuses("try with what is no number", AT .. "9:3: try: with: expected { name = number, ... }", "cost ",
  'try = { value = "x", with = { scale = "1" } }, cost ')

local HALF = [[
/*@op
  name     = "half",
  summary  = "y = x / 2",
  pipeline = "elementwise",
@*/
//@device inline
DEVICE float apply(float x) { return x / 2; }

//@reference
return x / 2;

//@test tolerance=0 halves
expect_f32(test, t.out)[0] = 2;
]]
local function refuses_half(name, want, from, to)
  local first, last = HALF:find(from, 1, true)
  t.case(name, (t.messages("half", HALF:sub(1, first - 1) .. to .. HALF:sub(last + 1))), want)
end
do
  local why, op = t.messages("half", HALF)
  t.case("an elementwise op", why, "")
  t.case("has a role, waits and signals", ("%s %s %s"):format(op.roles.help, op.wait, op.signal), "true help help")
  t.case("reads and writes", ("%s %s"):format(op.reads[1].name, op.writes[1].name), "in out")
  t.case("has its function and the pipeline's task", ("%s %s"):format(op.inline.device.file, op.sections.help.file),
    "templates/ops/half.cu templates/elementwise.cu")
  t.case("has its test", ("%s %g %d"):format(op.tests[1].name, op.tests[1].tolerance, op.tests[1].line), "halves 0 13")
end
local HALF_AT = "templates/ops/half.cu:"
refuses_half("without a function", HALF_AT .. "1:6: pipeline 'elementwise' needs a section //@device inline",
  "//@device inline", "//@test 'of nothing'")
refuses_half("without a reference", HALF_AT .. "1:6: no //@reference section", "//@reference\nreturn x / 2;\n", "")
refuses_half("with an empty reference", HALF_AT .. "9:1: //@reference is empty", "return x / 2;\n\n//@test", "//@test")
refuses_half("with tasks of its own", HALF_AT .. "4:29: 'tile' is the pipeline's: leave it out, or leave out "
  .. 'pipeline = "elementwise"', '"elementwise",', '"elementwise", tile = "spread",')
refuses_half("with a role of its own",
  HALF_AT .. "1:6: //@device help: the pipeline elementwise supplies it; expected //@device inline",
  "//@reference", "//@device help\nDEVICE void help(Helper &, const Task &) {}\n//@reference")

local wrong = changed('"spread"', '"spred"', '"tiles*64"', '"tils*64"', 'role = "store"', 'role = "load"')
t.case("all mistakes of a file are found", (t.messages("add", wrong)), table.concat({
  AT .. "5:3: tile 'spred' is not one of columns, cyclic, every, owner, spread",
  AT .. "8:17: writes 'y': the op has no role 'load'",
  AT .. "8:17: writes 'y': only help or store may write global memory",
  AT .. "9:14: cost: \"tils*64\": unknown name 'tils', did you mean 'tile'?",
}, "\n"))

t.done()
