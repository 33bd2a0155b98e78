-- `nmkgen init` on checkpoints that it takes: the toy's spec letter by letter, the shipped specs from their models'
-- config.json, and how the file comes to be.
if not package.preload.yaml then
  local ok = os.execute("build/nmkgen --lua tests/gen/init_spec.lua")
  os.exit(ok and 0 or 1)
end
local h = dofile("tests/gen/helper_init.lua")
local t = h.t
local checkpoint, configs, diags = require("checkpoint"), require("config"), require("diag")
local families, host, json, spec = require("family"), require("host"), require("json"), require("spec")
local TOY = "examples/nmc-toy"

-- ---- the toy

local SHAPE = [[
shape:
  layers: 5                 # num_hidden_layers
  hidden: 256               # hidden_size
  heads: 8                  # num_attention_heads
  kv_heads: 1               # num_key_value_heads
  head_dim: 128             # head_dim
  dense_layers: 1           # first_k_dense_replace
  dense_ff: 512             # prefix_dense_intermediate_size
  experts: 16               # num_experts
  experts_per_token: 4      # num_experts_per_tok
  expert_ff: 96             # intermediate_size
  vocab: 4096               # vocab_size
  full_attention_every: 4   # by layer_types
  sliding_window: 128       # sliding_window
  rope_theta: 50000         # rope_theta
  norm_eps: 1e-06           # rms_norm_eps
  logit_scale: 1            # logit_scale
  max_context: 4096         # max_position_embeddings
]]
local SPEC = [[
# nmc-toy: by `nmkgen init` from a checkpoint of Cohere2MoeForCausalLM; `nmkgen keys` tells what the keys mean.
# Next: nmkgen check specs/nmc-toy.yaml; in specs/, make build/nmc-toy/nmk-serve builds the server.
#
# Weights take 22.4 MiB, keys and values 1.0 KiB a token and 192.0 KiB a sequence for the windows.
# Bound by the memory of h200: 272584 tokens/s for one sequence of 4096 tokens.
# 226 tensors, names, shapes and types compared, by 2 files of safetensors.
# Tokenizer: tokenizer.json; chat template: chat_template.jinja.
# End of sequence, by generation_config.json: [4, 2].
# Defaults of a request, by generation_config.json: do_sample true, temperature 1, top_p 0.95.
# Silent in config.json, and taken as: use_qk_norm = false, use_parallel_block = true, partial_rotary_factor = 1.
model: nmc-toy
family: cohere2_moe
target: h200

]] .. SHAPE
local status, out, err, names, _
status, out, err = h.init(TOY)
t.same("the toy's spec", status .. out .. err, "0" .. SPEC)
t.same("a folder with a slash at its end", select(2, h.init(TOY .. "/")), SPEC)

local file = t.folder .. "/specs/nmc-toy.yaml"
status, out, err = h.init(TOY, "-o " .. file)
t.same("-o", status .. out .. err, ("0wrote %s; next: nmkgen check %s\n"):format(file, file))
local function below(text) return text:match("\n#\n.*") end
t.same("-o writes what is printed", below(t.read(file)), below(SPEC))
t.case("-o names itself", t.read(file):find("\n# Next: nmkgen check " .. file .. ";", 1, true) ~= nil, t.read(file))
status, out, err = t.run("build/nmkgen check " .. file)
t.case("the written spec passes check", status == 0 and out:find("^nmc%-toy: 5 layers, .*proven\n$") ~= nil, out .. err)
status, out, err = h.init(TOY, "-o " .. file)
t.same("a file is not overwritten", status .. out .. err, "1" .. file .. ": exists; --force writes over it\n")
t.write(file, "old")
status = h.init(TOY, "--force -o " .. file)
t.same("--force", status .. t.read(file):sub(1, 9), "0# nmc-toy")
_, out = h.init(TOY, "--name other.name-1")
t.same("--name", out:match("\n(model: [^\n]*)"), "model: other.name-1")
_, out = h.init(TOY, "-t h100")
t.same("-t", out:match("\n(target: [^\n]*)"), "target: h100")
status, out, err = h.init(TOY, "-t h20")
t.same("unknown target", status .. out .. err, "1nmkgen: --target: unknown target 'h20', did you mean 'h200'?\n")

-- ---- config.json alone

local function spec_of(name, config, files)
  files = files or {}
  files["config.json"] = config
  return h.init(h.folder(name, files))
end
local function line_of(text, start)
  for line in text:gmatch("[^\n]+") do
    if line:sub(1, #start) == start then return line end
  end
end
status, out, err = spec_of("Command R (7B)", h.config)
t.same("a name from a folder", out:match("\n(model: [^\n]*)"), "model: command-r--7b-")
t.same("without tensors and tokenizer", status .. err, [[
0nmkgen: DIR: No safetensors in the folder: names and shapes of tensors could not be compared
nmkgen: DIR: tokenizer.json is missing: prompts can only be token ids
]])
t.same("the shape is the same", out:match("\n(shape:.*)"), SHAPE)
t.same("end of sequence by config.json", line_of(out, "# End"), "# End of sequence, by config.json: 4.")
_, out = spec_of("models--org--My-Model/snapshots/0123abc", h.config)
t.same("a name from the cache", out:match("\n(model: [^\n]*)"), "model: my-model")

local function with(...)
  local text, list = h.config, { ... }
  for i = 1, #list, 2 do text = h.replace(text, list[i], list[i + 1]) end
  return text
end
_, out = spec_of("x", with('"vocab_size": 4096', '"vocab_size": 4096.0',
  '"sliding_window": 128', '"sliding_window": 1.28e2'))
t.same("numbers as they may be written", out:match("\n(shape:.*)"), SHAPE)
_, out = spec_of("x", with('  "rope_theta": 50000.0,\n  "shared_expert', '  "shared_expert'))
t.same("rope_parameters", line_of(out, "  rope_theta"), "  rope_theta: 50000         # rope_parameters.rope_theta")
_, out = spec_of("x", with('"max_position_embeddings": 4096', '"max_position_embeddings": 10485760'))
t.same("more context than there can be", line_of(out, "  max_context"),
  "  max_context: 4194304      # max_position_embeddings is 10485760, more than nmkgen takes")
_, out = spec_of("x", with('"problem_type": null', '"made_up": [1, {"a": "\\u2028b"}], "other": null',
  '"layer_norm_eps": 1e-05', '"clip_qkv": null'))
t.same("unknown keys", line_of(out, "# In config"),
  '# In config.json, unknown to nmkgen and ignored: made_up = [1, {"a": "???b"}].')
_, out = spec_of("x", with('"dtype": "bfloat16",', ""))
t.same("no dtype", line_of(out, "# config"), "# config.json names no dtype; weights must be bfloat16.")
_, out = spec_of("x", h.config, { ["tokenizer.model"] = "", ["generation_config.json"] = "{}" })
t.same("an old tokenizer", line_of(out, "# token"),
  "# tokenizer.json is missing, and tokenizer.model is not read: prompts can only be token ids.")
t.same("a silent generation_config.json", line_of(out, "# Defaults"),
  "# Defaults of a request: none, generation_config.json is silent.")
_, out = spec_of("x", h.config, {
  ["tokenizer.json"] = "{}", ["tokenizer_config.json"] = '{"chat_template": "{{ x }}"}',
})
t.same("a chat template inside", line_of(out, "# Token"),
  "# Tokenizer: tokenizer.json; chat template: in tokenizer_config.json.")
_, out = spec_of("x", h.config, { ["tokenizer.json"] = "{}" })
t.same("no chat template", line_of(out, "# Token"),
  "# Tokenizer: tokenizer.json; there is no chat template: /v1/chat/completions needs --chat-template.")

-- ---- tensors

local INDEX = "model.safetensors.index.json"
_, out = spec_of("x", h.config, { [INDEX] = t.read(TOY .. "/" .. INDEX) })
t.same("an index without its files", line_of(out, "# 226"),
  "# 226 tensors, only names compared, by model.safetensors.index.json alone.")
local entries = {}
for name in t.read(TOY .. "/" .. INDEX):gmatch('"(model%.[%w_.]+)": "') do
  local shape = name == "model.embed_tokens.weight" and "[4112, 256]" or h.shapes[name]
  entries[#entries + 1] = { name, "BF16", shape }
end
entries[#entries + 1] = { "model.layers.0.self_attn.rotary_emb.inv_freq", "F32", "[64]" }
entries[#entries + 1] = { "lm_head.weight", "BF16", "[4112, 256]" }
status, out, err = spec_of("x", h.config, { ["model.safetensors"] = h.safetensors(entries), ["tokenizer.json"] = "{}" })
t.same("more rows than vocab_size", status .. err .. tostring(line_of(out, "  vocab")),
  "0nmkgen: DIR: vocab_size is 4096 in config.json, but model.embed_tokens.weight has 4112 rows, which is taken: "
    .. "correct config.json, which the programs compare too\n  vocab: 4112               # vocab_size")
t.same("a head that is there twice", line_of(out, "# lm_head"),
  "# lm_head.weight is among the tensors too, a copy of another.")

-- ---- JSON

local function parsed(text)
  local diag = diags.new()
  local node = json.parse(text, "x", diag)
  return node and json.plain(node) or diag:lines()[1]
end
t.same("escapes", parsed('"\\u00e4\\ud83d\\ude00\\/\\n\\"\\\\"'), "ä😀/\n\"\\")
t.same("an integer", math.type(parsed("-9007199254740993")), "integer")
t.same("an integer as it is", parsed("-9007199254740993"), -9007199254740993)
t.same("a float", parsed("1E-2"), 0.01)
t.same("shortest text", json.number(0.1) .. " " .. json.number(1 / 3) .. " " .. json.number(1e6),
  "0.1 0.33333333333333331 1000000")

-- ---- every family, by config.json as published and as transformers writes it

-- The shape by config.json, without the limits of the templates; all of its other keys are judged too.
local function read(dir, diag)
  local config = configs.load(dir, diag)
  local family = config and config:find_family(spec.families(host.root, diag))
  if not family then return nil end
  config:check_common()
  local shape = config:shape(checkpoint.tensors(dir, diag))
  if diag:count() == 0 then config:check(families.config({ shape = shape, family_module = family })) end
  return shape, config, family
end

-- Where the shipped spec says something else on purpose.
local EXCEPT = { ["north-mini-code"] = { max_context = 500000 }, ["command-r7b"] = { max_context = 132096 } }
local PUBLISHED = "tests/gen/configs/"

-- The folder's config.json against the spec `ours`, which need not be there.
local function compare(name, dir, ours)
  local diag = diags.new()
  local shape, config, family = read(dir, diag)
  t.same(name .. " has no mistakes", table.concat(diag:lines(), "\n"), "")
  t.same(name .. ": nothing is ignored", table.concat(config and config.ignored or {}, ", "), "")
  if not t.exists(ours) then return end
  local shipped = spec.load(ours, diags.new())
  for _, row in ipairs(family and family.shape or {}) do
    local key = row[1]
    local want = EXCEPT[name] and EXCEPT[name][key] or shipped.shape[key]
    t.case(("%s: %s"):format(name, key), configs.same(shape[key], want),
      ("by config.json %s, in %s %s"):format(tostring(shape[key]), ours, tostring(want)))
  end
  -- What the templates take of the shipped spec they take of init's.
  local code = t.run("build/nmkgen check " .. ours)
  status, out, err = h.init(dir, "-o " .. t.folder .. "/x.yaml --force")
  t.case(name .. ": init does as check does", status == code, out .. err)
  if status == 0 then
    local written = spec.load(t.folder .. "/x.yaml", diag)
    t.same(name .. ": what init wrote is a spec", table.concat(diag:lines(), "\n"), "")
    for _, row in ipairs(family.shape) do
      t.case(("%s: %s is written"):format(name, row[1]), configs.same(written.shape[row[1]], shape[row[1]]))
    end
  end
end
_, names = t.run("ls " .. PUBLISHED)
for name in names:gmatch("%S+") do compare(name, PUBLISHED .. name, "specs/" .. name .. ".yaml") end
_, names = t.run("ls -d tests/models/*/")
for name in names:gmatch("models/([^/]+)/\n") do
  compare(name, "tests/models/" .. name, "tests/models/" .. name .. ".yaml")
end

-- ---- a finetune has the schedule of its model

local function schedule_of(name, old, new)
  local text = t.read(PUBLISHED .. name .. "/config.json")
  _, out = spec_of("x", old and h.replace(text, old, new) or text)
  return out:match("\n(schedule:.*)") or "none", line_of(out, "# The schedule")
end
local shipped = t.read("specs/qwen3-30b-a3b.yaml"):match("\n(schedule:.*)")
local laid_out, noted = schedule_of("qwen3-coder-30b-a3b")
t.same("a finetune's schedule", laid_out, shipped)
t.same("where it comes from", noted, "# The schedule is that of specs/qwen3-30b-a3b.yaml, whose sizes these are.")
t.same("other sizes",
  (schedule_of("qwen3-coder-30b-a3b", '"num_experts_per_tok": 8', '"num_experts_per_tok": 4')), "none")
t.same("a model without one", (schedule_of("qwen3-8b")), "none")
t.same("-t", (select(2, h.init(PUBLISHED .. "qwen3-30b-a3b", "-t h100")):match("\nschedule:")), nil)

-- ---- what is taken where config.json is silent

local function value(name, changes, key, files)
  local text = t.read(PUBLISHED .. name .. "/config.json")
  for i = 1, #changes, 2 do text = h.replace(text, changes[i], changes[i + 1]) end
  files = files or {}
  files["config.json"] = text
  local diag = diags.new()
  local shape, config = read(h.folder("x", files), diag)
  if diag:count() > 0 then return table.concat(diag:lines(), "\n") end
  return ("%s # %s"):format(shape[key], config.from[key].comment)
end
t.same("head_dim", value("llama-3.1-8b", {}, "head_dim"), "128 # no head_dim: hidden / heads")
t.same("kv_heads", value("llama-3.1-8b", { '"num_key_value_heads": 8,', "" }, "kv_heads"),
  "32 # no num_key_value_heads: as many as heads")
t.same("a class default", value("llama-3.1-8b", { '"rope_theta": 500000.0,', "" }, "rope_theta"),
  "10000.0 # no rope_theta: default of transformers' class")
local LONG = '"max_position_embeddings": 32768'
local function windowless(old, new)
  return (value("mistral-7b", { '"sliding_window": null,', old, LONG, new }, "max_context")
    :gsub("^.-config%.json:", ""))
end
t.same("a class default that the family has not", windowless("", LONG),
  "1:1: sliding_window is missing; transformers' class takes 4096 there, and the family mistral does not have it")
t.same("a window", windowless('"sliding_window": 4096,', LONG),
  "18:21: sliding_window: 4096 changes what the model computes, and the family mistral does not have it")
t.same("a window that no position reaches",
  windowless('"sliding_window": 4096,', '"max_position_embeddings": 4096'), "4096 # max_position_embeddings")
local UNTIED = { '"tie_word_embeddings": false,', "" }
t.same("tied by default", value("llama-3.1-8b", UNTIED, "tied"),
  "false # no tie_word_embeddings: default of transformers' class")
local LISTED = '{"weight_map": {"model.embed_tokens.weight": "a.safetensors"%s}}'
t.same("tied by the tensors", value("llama-3.1-8b", UNTIED, "tied", { [INDEX] = LISTED:format("") }),
  "true # no tie_word_embeddings: lm_head.weight is not among the tensors")
t.same("untied by the tensors",
  value("llama-3.1-8b", UNTIED, "tied", { [INDEX] = LISTED:format(', "lm_head.weight": "a.safetensors"') }),
  "false # no tie_word_embeddings: lm_head.weight is among the tensors")
t.same("scaling as transformers 5 spells it",
  value("llama-3.2-1b", { '"rope_scaling": {', '"rope_parameters": {"rope_theta": 500000.0, ' }, "rope_factor"),
  "32.0 # rope_parameters.factor")
t.same("scaling by its old name",
  value("smollm2-135m", { '"rope_scaling": null', '"rope_scaling": {"type": "linear", "factor": 2}' }, "rope_type"),
  "linear # rope_scaling.type")

-- ---- what other families do not have

local function refused(name, model, changes, want)
  local got = value(model, changes, "layers")
  t.same(name, got:gsub("build/tests/gen_init_spec/x/config.json:", ""), want)
end
refused("RoPE scaled in an unknown way", "smollm2-135m",
  { '"rope_scaling": null', '"rope_scaling": {"type": "dynamic", "factor": 2}' },
  '22:28: rope_scaling.type: expected one of default, linear, llama3, yarn, got "dynamic"')
refused("RoPE scaled without a factor", "llama-3.1-8b", { '"factor": 8.0, ', "" },
  "19:19: rope_parameters.factor is missing; the family llama needs it, and takes no default")
refused("a window", "llama-3.1-8b", { '"mlp_bias": false', '"mlp_bias": false, "sliding_window": 4096' },
  "12:40: sliding_window: 4096 changes what the model computes, and the family llama does not have it")
refused("a window that is long enough", "llama-3.1-8b",
  { '"mlp_bias": false', '"mlp_bias": false, "sliding_window": 131072' },
  "32 # num_hidden_layers")
refused("biases", "llama-3.1-8b", { '"mlp_bias": false', '"mlp_bias": true' },
  "12:15: mlp_bias: true is not supported; the family llama has false")
refused("experts", "llama-3.1-8b", { '"mlp_bias": false', '"mlp_bias": false, "num_local_experts": 8' },
  "12:43: num_local_experts: 8 changes what the model computes, and the family llama does not have it; it has 0")
refused("windows in some layers", "qwen3-8b", { '"use_sliding_window": false', '"use_sliding_window": true' },
  "26:25: use_sliding_window: true is not supported; the family qwen3 has false")
refused("dense layers between", "qwen3-30b-a3b",
  { '"decoder_sparse_step": 1', '"decoder_sparse_step": 2', '"mlp_only_layers": []', '"mlp_only_layers": [0]' },
  "6:26: decoder_sparse_step: 2 is not supported; the family qwen3_moe has 1\n"
    .. "15:22: mlp_only_layers: a list of 1, here the family qwen3_moe has one of 0")
refused("no list of layers", "qwen3-30b-a3b", { '"mlp_only_layers": []', '"mlp_only_layers": [null]' },
  "15:22: mlp_only_layers: a list of 1, here the family qwen3_moe has one of 0")
refused("full layers first", "command-r7b", { "local_attn_first", "global_attn_first" },
  '21:34: order_of_interleaved_layers: "global_attn_first" changes what the model computes, and the family cohere2 '
    .. 'does not have it; it has "local_attn_first"')

-- ---- a spec of another family, where the templates take it

if t.run("build/nmkgen check specs/llama-3.1-8b.yaml") == 0 then
  _, out = h.init(PUBLISHED .. "llama-3.1-8b")
  t.same("Llama's spec", out:match("\n# Not in config.*"), [[

# Not in config.json, and left out below: rope_beta_fast (32), rope_beta_slow (1), rope_attention_factor (0).
# Silent in config.json, and taken as: rope_interleaved = false, partial_rotary_factor = 1, layer_types =
#   "full_attention" throughout.
model: llama-3.1-8b
family: llama
target: h200

shape:
  layers: 32                    # num_hidden_layers
  hidden: 4096                  # hidden_size
  heads: 32                     # num_attention_heads
  kv_heads: 8                   # num_key_value_heads
  head_dim: 128                 # no head_dim: hidden / heads
  dense_ff: 14336               # intermediate_size
  vocab: 128256                 # vocab_size
  tied: false                   # tie_word_embeddings
  attention_bias: false         # attention_bias
  rope_theta: 500000            # rope_theta
  rope_type: llama3             # rope_scaling.rope_type
  rope_factor: 8                # rope_scaling.factor
  rope_original_context: 8192   # rope_scaling.original_max_position_embeddings
  rope_low_freq_factor: 1       # rope_scaling.low_freq_factor
  rope_high_freq_factor: 4      # rope_scaling.high_freq_factor
  norm_eps: 1e-05               # rms_norm_eps
  max_context: 131072           # max_position_embeddings
]])
else
  print("skip - Llama's spec: check refuses specs/llama-3.1-8b.yaml")
end

t.done()
