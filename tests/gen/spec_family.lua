-- Mistakes in a family or a target: each is made in a copy of specs/, which NMK_ROOT names.
local t = dofile("tests/gen/helper_spec.lua")

local root = t.folder .. "/root"
local FAMILY, TARGET = "specs/families/cohere2_moe.lua", "specs/targets/h200.yaml"
t.run(('mkdir -p %s && cp -r specs %s && ln -s "$PWD/gen" "$PWD/templates" %s'):format(root, root, root))

-- Replaces `old`, plain text that stands there once, and expects these lines, without what all begin with: the file.
-- LINE is the line of `old`, <TEXT> the first one with that text.
local function mistake(name, file, old, new, want)
  local text = t.read(file)
  local from, to = text:find(old, 1, true)
  assert(from and not text:find(old, to, true), "not there once: " .. old)
  t.write(root .. "/" .. file, text:sub(1, from - 1) .. new .. text:sub(to + 1))
  local status, out, err = t.run(("NMK_ROOT=%s build/nmkgen check %s/specs/nmc-toy.yaml"):format(root, root))
  t.write(root .. "/" .. file, text)
  local function line_at(offset) return tostring(1 + select(2, text:sub(1, offset):gsub("\n", ""))) end
  local lines = {}
  for i, message in ipairs(want) do
    message = message:gsub("^LINE", line_at(from))
    message = message:gsub("^<(.-)>", function(mark) return line_at(assert(text:find(mark, 1, true), mark)) end)
    lines[i] = ("%s:%s\n"):format(file, message)
  end
  t.same(name, ("%d %s%s"):format(status, out, err), "1 " .. table.concat(lines))
end

mistake("syntax", FAMILY, "M.summary =", "M.summary ==", { "LINE:1: syntax error near '=='" })
mistake("run-time error", FAMILY, 'M.name = "cohere2_moe"', 'M.name = nothing.at_all',
  { "LINE:1: attempt to index a nil value (global 'nothing')" })
mistake("no files", FAMILY, 'M.name = "cohere2_moe"', 'M.name = io.read()',
  { "LINE:1: attempt to index a nil value (global 'io')" })
mistake("no random numbers", FAMILY, 'M.name = "cohere2_moe"', 'M.name = math.random()',
  { "LINE:1: attempt to call a nil value (field 'random')" })
mistake("name", FAMILY, 'M.name = "cohere2_moe"', 'M.name = "cohere"',
  { "LINE:3: name 'cohere' differs from the file's name" })
mistake("unknown part", FAMILY, "M.summary =", "M.sumary =",
  { "1:1: missing part 'summary', a string", "LINE:3: unknown part 'sumary', did you mean 'summary'?" })
mistake("wrong part", FAMILY, "M.summary =", "M.summary = 7 --",
  { "LINE:3: part 'summary' must be a string, not an integer" })
mistake("shape row", FAMILY, '"layers", "int", min = 1,', '"layers", "int", mni = 1,',
  { '<M.shape =>:3: shape: row 1 is not { key, "int" or "number", min =, max =, default =, doc = }' })
mistake("wave", FAMILY, '{ "router", after = { "norm" } }', '{ "router", after = { "down" } }',
  { "<M.waves =>:3: waves: 'router' is after 'down', which does not stand before it" })
mistake("rule", FAMILY, 'uses = { "layers" }', 'uses = { "layer" }',
  { "<M.rules =>:3: rules: rule 1 is not { key, test, expectation, uses = { keys } } of keys of shape" })
mistake("rule's uses", FAMILY, 'uses = { "layers" }', 'uses = 7',
  { "<M.rules =>:3: rules: rule 1 is not { key, test, expectation, uses = { keys } } of keys of shape" })
mistake("rule that fails", FAMILY, 's.dense_layers < s.layers', 's.dense_layers < s.layer',
  { "LINE:1: rules: dense_layers: attempt to compare number with nil" })
mistake("layout", FAMILY, 's.heads * s.head_dim, "rows")', 's.heads * s.head_dim, "row")',
  { "<function M.arrays>:1: arrays[4]: layout 'row' is unknown, did you mean 'rows'?" })
mistake("tensor rows", FAMILY, 's.hidden, "qkv", q)', 's.hidden, "qkv", q + 1)',
  { "<function M.tensors>:1: array 'qkv': layer 0 has 1280 rows, and tensors do not fill row 1024 just once" })
mistake("tensor array", FAMILY, 's.hidden, q, "o")', 's.hidden, q, "oo")',
  { "<function M.tensors>:1: tensor model.layers.%d.self_attn.o_proj.weight: unknown array 'oo', did you mean 'o'?",
    "<function M.tensors>:1: array 'o': layer 0 has 256 rows, and tensors do not fill row 0 just once" })
mistake("missing tensor", FAMILY, 'tensor(mlp .. "gate.weight", dense', 'print = (mlp .. "gate.weight"):format(dense',
  { "<function M.tensors>:1: array 'router': layer 1 has 16 rows, and tensors do not fill row 0 just once" })
mistake("weights", FAMILY, 'weights = from("o")', 'weights = from("oh")',
  { "<function M.block>:1: block(0).o_proj: weights: weight_kib: unknown array 'oh', did you mean 'o'?" })
mistake("weights of another form", FAMILY, 'weights = from("o")', 'weights = { weight_kib = 7 }',
  { "<function M.block>:1: block(0).o_proj: weights: weight_kib: expected { array = name, layer = }" })
mistake("node key", FAMILY, '{ op = "residual", tiles', '{ op = "residual", tile',
  { "<function M.block>:1: block(0).residual: unknown key 'tile', did you mean 'tiles'?" })
mistake("addition that the layer lacks", FAMILY, '{ op = "residual", tiles', '{ op = "residual", residual = 1, tiles',
  { "<function M.block>:1: block(0).residual: residual must be 0 to 0, less than the family's residuals; it is 1" })
mistake("additions of no number", FAMILY, 'M.name = "cohere2_moe"', 'M.residuals = "2"\nM.name = "cohere2_moe"',
  { "LINE:3: part 'residuals' must be an integer, not a string" })
mistake("more padding than a tile", FAMILY, 'return (s.vocab + 15) // 16 * 16', 'return (s.vocab + 31) // 16 * 16',
  { "<function M.tensors>:1: array 'embed': layer 0 has 4112 rows, and tensors do not fill row 4096 just once" })
mistake("function fails", FAMILY, 'list[#list + 1] = { path = path, value', 'list.x.y = { path = path, value',
  { "LINE:1: config: attempt to index a nil value (field 'x')" })

mistake("target key", TARGET, "regs:", "registers:",
  { "3:1: missing key 'regs' (32-bit registers of an SM), expected an integer from 65536 to 1048576",
    "LINE:1: registers: unknown key, known are: name, arch, sms, smem_bytes_per_block, regs, "
      .. "read_bytes_per_s" })
mistake("target value", TARGET, "sms: 132", "sms: many",
  { "LINE:6: sms: expected an integer from 1 to 512, got 'many'" })
mistake("target name", TARGET, "name: h200", "name: h100",
  { "LINE:7: name: 'h100' differs from the file's name" })

t.done()
