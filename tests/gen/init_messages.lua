-- What `nmkgen init` says of checkpoints that it cannot take.  Nothing is printed on standard output then.
local h = dofile("tests/gen/helper_init.lua")
local t = h.t

-- The toy's config.json with replacements, { old, new, ... }, and what is said of it, line by line.  LINE is the line
-- of the last replacement.
local function config(name, changes, want, files)
  local text, at = h.config, nil
  for i = 1, #changes, 2 do text, at = h.replace(text, changes[i], changes[i + 1]) end
  local number = 1 + select(2, text:sub(1, at or 0):gsub("\n", ""))
  files = files or {}
  files["config.json"] = text
  local status, out, err = h.init(h.folder("x", files))
  for i, line in ipairs(want) do
    line = line:gsub("^LINE", number)
    want[i] = (line:find("^%d+:%d+:") and "DIR/config.json:" or "") .. line .. "\n"
  end
  t.same(name, status .. out .. err, "1" .. table.concat(want))
end

-- ---- files

local function files(name, list, want)
  local status, out, err = h.init(h.folder("x", list))
  t.same(name, status .. out .. err, "1" .. want .. "\n")
end
files("no config.json", {}, "DIR/config.json: cannot be read: No such file or directory")
files("empty config.json", { ["config.json"] = "" },
  "DIR/config.json:1:1: not JSON: expected a value, got the end of the file")
files("a list", { ["config.json"] = "[1]" }, "DIR/config.json:1:1: expected an object, got [1]")
files("cut short", { ["config.json"] = '{"model_type": "cohere2_moe",\n "hidden_size"' },
  "DIR/config.json:2:15: not JSON: expected ':', got the end of the file")
files("comma at the end", { ["config.json"] = '{"a": [1, 2,]}' },
  "DIR/config.json:1:13: not JSON: expected a value, got ']'")
files("single quotes", { ["config.json"] = "{'a': 1}" },
  "DIR/config.json:1:2: not JSON: expected a key in double quotes, got '''")
files("NaN", { ["config.json"] = '{"a": NaN}' }, "DIR/config.json:1:7: not JSON: 'NaN' is no value")
files("minus infinity", { ["config.json"] = '{"a": -Infinity}' },
  "DIR/config.json:1:7: not JSON: '-Infinity' is no number")
files("too large", { ["config.json"] = '{"a": -1e999}' }, "DIR/config.json:1:7: the number '-1e999' is too large")
files("leading zero", { ["config.json"] = '{"a": 012}' }, "DIR/config.json:1:7: not JSON: '012' is no number")
files("key twice", { ["config.json"] = '{"a": 1,\n"a": 2}' }, "DIR/config.json:2:1: the key 'a' is given twice")
files("open text", { ["config.json"] = '{"a": "b' }, "DIR/config.json:1:7: not JSON: this text is not closed")
files("line break in a text", { ["config.json"] = '{"a": "b\n"}' },
  "DIR/config.json:1:9: not JSON: byte 10 inside a text")
files("half a surrogate pair", { ["config.json"] = '{"a": "\\ud83d"}' },
  "DIR/config.json:1:8: not JSON: \\ud83d is half of a surrogate pair")
files("not UTF-8", { ["config.json"] = '{"\xc3\xa4": "\xff"}' }, "DIR/config.json:1:8: not UTF-8 text")
files("byte order mark", { ["config.json"] = "\xef\xbb\xbf{}" },
  "DIR/config.json:1:1: not JSON: begins with a byte order mark")
files("text after the end", { ["config.json"] = "{} {}" },
  "DIR/config.json:1:4: not JSON: expected the end of the file, got '{'")
files("nesting", { ["config.json"] = '{"a": ' .. ("["):rep(70) },
  "DIR/config.json:1:71: nested deeper than 64 levels")

-- ---- the family

local _, folder = t.run("ls specs/families/*.lua")
local types = {}
for file in folder:gmatch("%S+") do
  for list in t.read(file):gmatch("M%.model_types = (%b{})") do
    for name in list:gmatch('"(.-)"') do types[#types + 1] = name end
  end
end
local known = "known are: " .. table.concat(types, ", ")
config("unknown model_type", { '"model_type": "cohere2_moe"', '"model_type": "cohere2moe"' },
  { 'LINE:17: model_type: no family is for "cohere2moe", the nearest name is \'cohere2_moe\'; ' .. known })
config("no model_type", { '"model_type": "cohere2_moe",', "" },
  { "1:1: model_type is missing; " .. known })
config("model_type is no text", { '"model_type": "cohere2_moe"', '"model_type": 7' },
  { "LINE:17: model_type: expected a text, got 7" })
config("architecture", { "Cohere2MoeForCausalLM", "Cohere2MoeForSequenceClassification" },
  { 'LINE:5: architectures: "Cohere2MoeForSequenceClassification" is not supported, only models ...ForCausalLM are' })

config("architectures", { '[\n    "Cohere2MoeForCausalLM"\n  ]', '{"a": 1}' },
  { 'LINE:20: architectures: expected a list, got {"a": 1}' })

-- ---- values

config("missing", { '"num_hidden_layers": 5,', "" }, { "1:1: num_hidden_layers is missing; it gives layers: "
  .. "transformer layers" })
config("null is missing", { '"head_dim": 128', '"head_dim": null' },
  { "1:1: head_dim is missing; it gives head_dim: width of one head" })
config("several at once", { '"head_dim": 128,', "", '"vocab_size": 4096', '"vocab_size": "many"' },
  { "1:1: head_dim is missing; it gives head_dim: width of one head",
    'LINE:17: vocab_size: expected an integer from 16 to 1048576, got "many"' })
config("fraction", { '"hidden_size": 256', '"hidden_size": 256.5' },
  { "LINE:18: hidden_size: expected an integer from 64 to 65536, got 256.5" })
config("beyond 64 bits", { '"hidden_size": 256', '"hidden_size": 100000000000000000000' },
  { "LINE:18: hidden_size: expected an integer from 64 to 65536, got 1e+20" })
config("negative", { '"num_experts": 16', '"num_experts": -16' },
  { "LINE:18: num_experts: expected an integer from 1 to 4096, got -16" })
config("a list for a number", { '"sliding_window": 128', '"sliding_window": [128, 256]' },
  { "LINE:21: sliding_window: expected an integer from 64 to 1048576, got [128, 256]" })
config("two places that differ", { '"rope_theta": 50000.0,\n    "rope_type"', '"rope_theta": 10000,\n    "rope_type"' },
  { "LINE:19: rope_parameters.rope_theta is 10000, but rope_theta is 50000" })

-- What check says of the toy's spec with one other value, init says of the key of config.json that gives the value.
local function limit(name, key, path, value)
  local text = t.read("specs/nmc-toy.yaml"):gsub("\n  " .. key .. ": %d+", ("\n  %s: %d"):format(key, value))
  local _, _, err = t.run("build/nmkgen check " .. t.write(t.folder .. "/limit.yaml", text))
  local want = {}
  for message in err:gmatch("shape%." .. key .. ": ([^\n]*)") do
    want[#want + 1] = ("LINE:%d: %s: %s"):format(#path + 7, path, message)
  end
  t.case(name .. ": there is a limit", #want > 0, err)
  local old = h.config:match('"' .. path .. '": %d+')
  config(name, { old, ('"%s": %d'):format(path, value) }, want)
end
limit("limits of the templates", "expert_ff", "intermediate_size", 100)
limit("rules of the family", "experts_per_token", "num_experts_per_tok", 17)

-- ---- what the family does not have

config("quantised", { '"problem_type": null', '"quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}' },
  { 'LINE:26: quantization_config: "fp8" is not supported; weights must be bfloat16' })
config("dtype", { '"dtype": "bfloat16"', '"dtype": "float16"' },
  { 'LINE:12: dtype: "float16" is not supported; weights must be bfloat16' })
config("torch_dtype", { '"dtype": "bfloat16"', '"torch_dtype": "float32"' },
  { 'LINE:18: torch_dtype: "float32" is not supported; weights must be bfloat16' })
config("activation", { '"hidden_act": "silu"', '"hidden_act": "gelu"' },
  { 'LINE:17: hidden_act: "gelu" is not supported; the family cohere2_moe has "silu"' })
config("bias", { '"attention_bias": false', '"attention_bias": true' },
  { "LINE:21: attention_bias: true is not supported; the family cohere2_moe has false" })
config("a fact that may not be silent", { '"norm_topk_prob": false,', "" },
  { "1:1: norm_topk_prob is missing; the family cohere2_moe needs it to say false, and takes no default" })
config("kinds of layers", { '"layer_types": [\n    "full_attention"', '"layer_types": [\n\n    "sliding_attention"' },
  { '30:5: layer_types[0]: "sliding_attention" is not supported; here the family cohere2_moe has "full_attention"' })
config("number of layers", { '"layer_types": [\n    "full_attention",', '"layer_types": [' },
  { "LINE:18: layer_types: a list of 4, here the family cohere2_moe has one of 5" })
config("scaled RoPE", { '"rope_type": "default"', '"rope_type": "linear", "factor": 8.0' },
  { 'LINE:18: rope_parameters.rope_type: "linear" is not supported; the family cohere2_moe has "default"' })
config("RoPE scaled in one of two places",
  { '"rope_scaling": null', '"rope_scaling": {"type": "linear", "factor": 8}' },
  { 'LINE:28: rope_scaling.type is "linear", but rope_parameters.rope_type is "default"',
    "LINE:48: rope_scaling.factor: 8 changes what the model computes, and the family cohere2_moe does not have it" })
config("RoPE as a text", { '"rope_scaling": null', '"rope_scaling": "linear"' },
  { 'LINE:19: rope_scaling: expected an object, got "linear"' })
config("RoPE by kinds of layers",
  { '"rope_type": "default"', '"rope_type": "default", "full_attention": {"factor": 2}' },
  { 'LINE:47: rope_parameters.full_attention: {"factor": 2} changes what the model computes, and the family '
    .. "cohere2_moe does not have it" })
config("part of the head turned", { '"rope_type": "default"', '"rope_type": "default", "partial_rotary_factor": 0.5' },
  { 'LINE:54: rope_parameters.partial_rotary_factor: 0.5 is not supported; the family cohere2_moe has 1' })
config("keys that change the result", { '"problem_type": null', '"clip_qkv": 8.0', '"return_dict": true',
                                        '"final_logit_softcapping": 30, "qk_norm": true' },
  { "57:15: clip_qkv: 8 changes what the model computes, and the family cohere2_moe does not have it",
    "LINE:30: final_logit_softcapping: 30 changes what the model computes, and the family cohere2_moe does not have it",
    "LINE:45: qk_norm: true changes what the model computes, and the family cohere2_moe does not have it; it has false",
  })
config("a model with images", { '"problem_type": null', '"vision_config": {}' },
  { "LINE:20: vision_config: {} changes what the model computes, and the family cohere2_moe does not have it" })

-- ---- tensors

local SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
config("no safetensors header", {}, { "DIR/model.safetensors: not safetensors: 3 bytes long" }, { [SINGLE] = "abc" })
config("a header longer than the file", {},
  { "DIR/model.safetensors: not safetensors: a header of 4096 bytes in a file of 10" },
  { [SINGLE] = string.pack("<i8", 4096) .. "{}" })
config("a negative header", {}, { "DIR/model.safetensors: not safetensors: a header of -1 bytes in a file of 10" },
  { [SINGLE] = string.pack("<i8", -1) .. "{}" })
config("a damaged header", {},
  { "DIR/model.safetensors (header):1:3: not JSON: expected a key in double quotes, got the end of the file" },
  { [SINGLE] = string.pack("<i8", 2) .. "{ " })
config("a header without shapes", {},
  { "DIR/model.safetensors: not safetensors: tensor a has no dtype and shape" },
  { [SINGLE] = string.pack("<i8", 8) .. '{"a":{}}' })
config("a size that is none", {},
  { "DIR/model.safetensors: not safetensors: tensor a has no dtype and shape" },
  { [SINGLE] = h.safetensors({ { "a", "BF16", '[4, "x"]' } }) })
config("no weight_map", {}, { "DIR/model.safetensors.index.json:1:1: weight_map is missing or empty" },
  { [INDEX] = '{"metadata": {}}' })
config("an index that leaves the folder", {},
  { "DIR/model.safetensors.index.json:1:22: tensor a: expected the name of a .safetensors file, "
    .. 'got "../b.safetensors"' },
  { [INDEX] = '{"weight_map": {"a": "../b.safetensors"}}' })
config("other tensors", {},
  { "DIR: lacks tensors of the family cohere2_moe: model.embed_tokens.weight, model.norm.weight, "
      .. "model.layers.0.input_layernorm.weight and 223 more",
    "DIR: has tensors that the family cohere2_moe does not have: transformer.wte.weight" },
  { [INDEX] = '{"weight_map": {"transformer.wte.weight": "model-1.safetensors"}}' })

-- The toy's index with the file of one tensor replaced by one that says something else.
local index = t.read("examples/nmc-toy/" .. INDEX)
local names = {}
for name in index:gmatch('"(model%.[%w_.]+)": "') do names[#names + 1] = name end
local function tensors(name, change, want)
  local entries = {}
  for i, tensor in ipairs(names) do entries[i] = { tensor, "BF16", h.shapes[tensor] } end
  change(entries)
  config(name, {}, want, { [SINGLE] = h.safetensors(entries) })
end
tensors("bias", function(list) list[#list + 1] = { "model.layers.0.self_attn.q_proj.bias", "BF16", "[1024]" } end,
  { "DIR: has tensors that the family cohere2_moe does not have: model.layers.0.self_attn.q_proj.bias" })
tensors("missing tensor", function(list) table.remove(list, 1) end,
  { "DIR: lacks tensors of the family cohere2_moe: model.embed_tokens.weight" })
tensors("shapes and types", function(list)
    list[2] = { list[2][1], "F32", "[7]" }
  end,
  { "DIR: tensors have other shapes than config.json says: " .. names[2] .. " [7], not [256]",
    "DIR: weights must be bfloat16 (BF16): " .. names[2] .. " is F32" })

t.done()
