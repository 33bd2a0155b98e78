-- Mistakes in a family or a target: each is made in a copy of specs/, which NMK_ROOT names.
local t = dofile("tests/gen/helper_spec.lua")

local root = t.folder .. "/root"
local FAMILY, LIBRARY = "specs/families/cohere2_moe.lua", "specs/families/lib/decoder.lua"
local TARGET = "specs/targets/h200.yaml"
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
    message = message:gsub("^<(.-)>", function(mark)
      if text:find(mark, 1, true) then return line_at(text:find(mark, 1, true)) end
      local library = t.read(LIBRARY)
      local before = library:sub(1, assert(library:find(mark, 1, true), mark))
      return ("%s:%d"):format(LIBRARY, 1 + select(2, before:gsub("\n", "")))
    end)
    lines[i] = message:find("^specs/") and message .. "\n" or ("%s:%s\n"):format(file, message)
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
mistake("shape row", FAMILY, '"dense_layers", "int", min = 0,', '"dense_layers", "int", mni = 0,',
  { "<M.shape =>:3: shape: row 6 is not { key, type, default =, doc = } of the type int or number with min = and "
    .. "max =, bool, or word with choices =" })
mistake("key of config.json", FAMILY, 'config = "first_k_dense_replace"', "config = 7",
  { "<M.shape =>:3: shape: dense_layers: config must be a string, not an integer" })
mistake("place without a key", FAMILY, 'config = "first_k_dense_replace"', 'or_config = "first_k_dense_replace"',
  { "<M.shape =>:3: shape: dense_layers: or_config without config" })
mistake("default of config.json", FAMILY, 'config = "first_k_dense_replace"',
  'config = "first_k_dense_replace", config_default = "8"',
  { "<M.shape =>:3: shape: dense_layers: config_default must be a number or a function, not a string" })
mistake("key of config.json twice", FAMILY, 'config = "first_k_dense_replace"', 'config = "num_hidden_layers"',
  { "<M.shape =>:3: shape: dense_layers: 'num_hidden_layers' of config.json is already the key 'layers'" })
mistake("a fact of shape again", FAMILY, '{ "norm_topk_prob", false', '{ "hidden_size", false',
  { "<function parts.config>:1: config[1]: 'hidden_size' is stated already, by shape, by model_types or in this list" })
mistake("no model_type", FAMILY, 'M.model_types = { "cohere2_moe" }', "M.model_types = {}",
  { "LINE:3: model_types: no model_type of config.json is named" })
mistake("several model_types", FAMILY, 'M.model_types = { "cohere2_moe" }', 'M.model_types = { "a", "b" }',
  { 'LINE:3: model_types: of several, a key of shape has to say which, by config = "model_type"' })
mistake("wave", LIBRARY, '{ "residual", after = { "o_proj", "down" } }', '{ "residual", after = { "o_proj", "dawn" } }',
  { "specs/families/cohere2_moe.lua:1:1: waves: 'residual' is after 'dawn', which does not stand before it" })
mistake("rule", FAMILY, 'uses = { "layers" }', 'uses = { "layer" }',
  { "<M.rules =>:3: rules: rule 1 is not { key, test, expectation, uses = { keys } } of keys of shape" })
mistake("rule's uses", FAMILY, 'uses = { "layers" }', 'uses = 7',
  { "<M.rules =>:3: rules: rule 1 is not { key, test, expectation, uses = { keys } } of keys of shape" })
mistake("rule that fails", FAMILY, 's.dense_layers < s.layers', 's.dense_layers < s.layer',
  { "LINE:1: rules: dense_layers: attempt to compare number with nil" })
mistake("layout", LIBRARY, 'array("o", 0, s.layers, 0, s.hidden, s.heads * s.head_dim, "rows")',
  'array("o", 0, s.layers, 0, s.hidden, s.heads * s.head_dim, "row")',
  { "<function parts.arrays>:1: arrays[4]: layout 'row' is unknown, did you mean 'rows'?" })
mistake("tensor rows", LIBRARY, 's.hidden, "qkv", q)', 's.hidden, "qkv", q + 1)',
  { "<function parts.tensors>:1: array 'qkv': layer 0 has 1280 rows, and tensors do not fill row 1024 just once" })
mistake("tensor array", LIBRARY, 's.hidden, q, "o")', 's.hidden, q, "oo")',
  { "<function parts.tensors>:1: tensor model.layers.%d.self_attn.o_proj.weight: unknown array 'oo', did you mean 'o'?",
    "<function parts.tensors>:1: array 'o': layer 0 has 256 rows, and tensors do not fill row 0 just once" })
mistake("missing tensor", LIBRARY, 'tensor("router", dense', 'print = ("router"):format(dense',
  { "<function parts.tensors>:1: array 'router': layer 1 has 16 rows, and tensors do not fill row 0 just once" })
mistake("weights", LIBRARY, 'weights = from("o")', 'weights = from("oh")',
  { "<function parts.block>:1: block(0).o_proj: weights: weight_kib: unknown array 'oh', did you mean 'o'?" })
mistake("weights of another form", LIBRARY, 'weights = from("o")', 'weights = { weight_kib = 7 }',
  { "<function parts.block>:1: block(0).o_proj: weights: weight_kib: expected { array = name, layer = }" })
mistake("node key", LIBRARY, 'residual = { op = "residual", tiles = s.hidden // 16 },',
  'residual = { op = "residual", tile = 1 },',
  { "<function parts.block>:1: block(0).residual: unknown key 'tile', did you mean 'tiles'?" })
mistake("addition that the layer lacks", LIBRARY, 'residual = { op = "residual", tiles = s.hidden // 16 },',
  'residual = { op = "residual", residual = 1, tiles = s.hidden // 16 },',
  { "<function parts.block>:1: block(0).residual: residual must be 0 to 0, less than the family's residuals; it is 1" })
mistake("additions of no number", FAMILY, 'M.name = "cohere2_moe"', 'M.residuals = "2"\nM.name = "cohere2_moe"',
  { "LINE:3: part 'residuals' must be an integer, not a string" })
mistake("more padding than a tile", LIBRARY, 'return round_up(s.vocab, 16)', 'return round_up(s.vocab, 16) + 16',
  { "<function parts.tensors>:1: array 'embed': layer 0 has 4112 rows, and tensors do not fill row 4096 just once" })
mistake("function fails", FAMILY, '"norm_topk_prob", false', 's.x.y, false',
  { "LINE:1: config: attempt to index a nil value (field 'x')" })
mistake("a library's function fails", LIBRARY, 'function parts.rope(m) return',
  'function parts.rope(m) m.x.y = 1 return',
  { "LINE:1: rope: attempt to index a nil value (field 'x')" })
mistake("a library's syntax", LIBRARY, 'local decoder = {}', 'local decoder == {}',
  { "LINE:1: unexpected symbol near '=='" })
mistake("unknown library", FAMILY, 'library("decoder")', 'library("decode")',
  { "LINE:1: there is no library 'decode' in specs/families/lib" })
mistake("a library elsewhere", FAMILY, 'library("decoder")', 'library("../cohere2_moe")',
  { "LINE:1: library: expected a name" })
mistake("unknown shared key", FAMILY, '"layers", "hidden"', '"layer", "hidden"',
  { "<M.shape =>:1: rows: there is no shared key 'layer'" })
mistake("a part of a vector", LIBRARY, 'tensor("final_norm", s.layers, 1, 0, 1, s.hidden, "norm")',
  'tensor("final_norm", s.layers, 1, 0, 1, s.hidden - 1, "norm", 1)',
  { "<function parts.tensors>:1: array 'norm': layer 5 has 256 elements, and tensors do not fill element 0 just once" })
mistake("a twin of nothing", LIBRARY, 'tensor("head", 0, 1, 0, s.vocab, s.hidden, "embed").twin',
  'tensor("head", 0, 1, 0, s.vocab - 16, s.hidden, "embed").twin',
  { "<function parts.tensors>:1: tensor lm_head.weight: a twin, but no other tensor fills the same of array 'embed'" })
mistake("frequencies", LIBRARY, 'function parts.rope(m) return rope.frequencies(m.shape)',
  'function parts.rope() return { 1.0 }',
  { "LINE:1: rope: expected head_dim / 2 = 64 numbers and scale" })

mistake("target key", TARGET, "regs:", "registers:",
  { "3:1: missing key 'regs' (32-bit registers of an SM), expected an integer from 65536 to 1048576",
    "LINE:1: registers: unknown key, known are: name, arch, sms, smem_bytes_per_block, regs, "
      .. "read_bytes_per_s, timing" })
mistake("target value", TARGET, "sms: 132", "sms: many",
  { "LINE:6: sms: expected an integer from 1 to 512, got 'many'" })
mistake("target name", TARGET, "name: h200", "name: h100",
  { "LINE:7: name: 'h100' differs from the file's name" })

t.done()
