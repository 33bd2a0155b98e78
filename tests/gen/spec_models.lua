-- The shipped specs against facts about the published checkpoints: parameters, tensors, some shapes, kinds of layers.
if not package.preload.yaml then
  local ok = os.execute("build/nmkgen --lua tests/gen/spec_models.lua")
  os.exit(ok and 0 or 1)
end
local t = dofile("tests/gen/helper_spec.lua")
local families, host, yaml = require("family"), require("host"), require("yaml")

local L = "model.layers."
local MODELS = {
  { "llama-3.2-1b", 1235814400, 146, { [L .. "15.self_attn.k_proj.weight"] = "[512, 2048]",
      [L .. "0.post_attention_layernorm.weight"] = "[2048]", ["lm_head.weight"] = "nil" } },
  { "llama-3.1-8b", 8030261248, 291, { [L .. "31.mlp.down_proj.weight"] = "[4096, 14336]",
      ["lm_head.weight"] = "[128256, 4096]" } },
  { "smollm2-135m", 134515008, 272, { [L .. "29.self_attn.v_proj.weight"] = "[192, 576]" } },
  { "qwen3-0.6b", 596049920, 310, { [L .. "27.self_attn.q_proj.weight"] = "[2048, 1024]",
      [L .. "27.self_attn.q_norm.weight"] = "[128]" } },
  { "qwen3-8b", 8190735360, 399, { [L .. "35.self_attn.k_norm.weight"] = "[128]" } },
  { "qwen3-30b-a3b", 30532122624, 18867, { [L .. "47.mlp.experts.127.down_proj.weight"] = "[2048, 768]",
      [L .. "0.mlp.gate.weight"] = "[128, 2048]" } },
  { "command-r7b", 8028033024, 258, { [L .. "31.mlp.up_proj.weight"] = "[14336, 4096]",
      [L .. "0.post_attention_layernorm.weight"] = "nil" } },
}

for _, row in ipairs(MODELS) do
  local name, parameters, count, some = table.unpack(row)
  local shapes, got_count, got_parameters = t.tensors(t.load(("specs/%s.yaml"):format(name)))
  t.same(name .. ": parameters", got_parameters, parameters)
  t.same(name .. ": tensors", got_count, count)
  for _, tensor in ipairs(require("emit.writer").sorted(some)) do
    t.same(name .. ": " .. tensor, tostring(shapes[tensor]), some[tensor])
  end
end

-- Command R7B: three layers with a window and RoPE, then one that sees everything and knows no positions.
local command = t.load("specs/command-r7b.yaml")
local kinds = {}
for i = 0, 7 do
  local kind = command.family_module.layer(i, command.shape)
  kinds[#kinds + 1] = kind.attention:sub(1, 1) .. (kind.rope and "r" or "n") .. kind.kv_layer
end
t.same("command-r7b: layers", table.concat(kinds, " "), "sr0 sr1 sr2 fn0 sr3 sr4 sr5 fn1")

-- The tiny models: the files' own tensors, and what config.json says.
local function header(path)
  local file = assert(io.open(path, "rb"))
  local text = file:read(string.unpack("<I8", file:read(8)))
  file:close()
  local shapes = {}
  for name, shape in text:gmatch('"([^"]+)":{"dtype":"BF16","shape":(%[[%d,]*%])') do
    shapes[name] = shape:gsub(",", ", ")
  end
  return shapes
end

local function find(node, path)
  for key in path:gmatch("[^.]+") do
    local found
    for _, item in ipairs(node and node.kind == "map" and node.items or {}) do
      if item.key.value == key then found = item.value end
    end
    node = found
  end
  return node and node.value ~= "null" and node or nil
end

local function agrees(node, want)
  if type(want) == "table" then
    for i, value in ipairs(want) do
      if not node.items[i] or node.items[i].value ~= value then return false end
    end
    return #node.items == #want
  end
  if type(want) == "number" then return tonumber(node.value) == want end
  return node.value == tostring(want)
end

for _, file in ipairs(host.list("tests/models")) do
  local name = file:match("^tiny%-(.*)%.yaml$")
  if not name then goto continue end
  local tiny, folder = t.load("tests/models/" .. file), "tests/models/tiny-" .. name
  local there, wanted = header(folder .. "/model.safetensors"), t.tensors(tiny)
  local wrong = {}
  for tensor, shape in pairs(wanted) do
    if there[tensor] ~= shape then wrong[#wrong + 1] = ("%s %s, %s"):format(tensor, shape, tostring(there[tensor])) end
  end
  for tensor in pairs(there) do
    if not wanted[tensor] then wrong[#wrong + 1] = tensor .. " is not wanted" end
  end
  table.sort(wrong)
  t.same(name .. ": its tensors", table.concat(wrong, "; "), "")
  local config, contradictions = yaml.load(folder .. "/config.json"), {}
  for _, fact in ipairs(families.config(tiny)) do
    local node = find(config, fact.path)
    for other in (fact.or_path or ""):gmatch("[^|]+") do node = node or find(config, other) end
    if not node and fact.required or node and not agrees(node, fact.value) then
      contradictions[#contradictions + 1] = fact.path
    end
  end
  t.same(name .. ": config.json", table.concat(contradictions, " "), "")
  ::continue::
end

-- ---- Mistral's layers are Llama's: the tiny Llama by either family is the same, but for its names

local function emitted(family)
  local spec = t.read("tests/models/tiny-llama.yaml"):gsub("family: llama", "family: " .. family)
  local out = t.folder .. "/" .. family
  local status, _, err = t.run(("build/nmkgen %s -o %s"):format(t.write(t.folder .. "/tiny.yaml", spec), out))
  if status ~= 0 then return err end
  return (t.read(out .. "/megakernel.cu") .. t.read(out .. "/refvm.c")):gsub("families/" .. family, "")
    :gsub("0x%x+ull", "")
end
t.case("mistral is llama", (emitted("mistral")) == emitted("llama"), "other text is emitted")

t.done()
