-- The family against facts: the published model's layer kinds and tensors, and the toy checkpoint's own files.
if not package.preload.yaml then
  local ok = os.execute("build/nmkgen --lua tests/gen/spec_cohere2_moe.lua")
  os.exit(ok and 0 or 1)
end
local t = dofile("tests/gen/helper_spec.lua")
local families, yaml = require("family"), require("yaml")

-- ---- North Mini Code: figures of its model card and checkpoint

local model = t.load("specs/north-mini-code.yaml")
local family = model.family_module
local kinds = {}
for i = 0, model.shape.layers - 1 do
  local kind = family.layer(i, model.shape)
  local name = ("%s %s %s"):format(kind.attention, kind.mlp, kind.rope and "rope" or "nope")
  kinds[name] = kinds[name] or {}
  table.insert(kinds[name], i)
end
local function list(name) return table.concat(kinds[name] or {}, " ") end
t.same("dense layer", list("full dense rope"), "0")
t.same("full layers", list("full moe nope"), "4 8 12 16 20 24 28 32 36 40 44 48")
t.same("sliding layers", #(kinds["sliding moe rope"] or {}), 36)
t.same("place of a full layer among its kind", family.layer(48, model.shape).kv_layer, 12)
t.same("place of a sliding layer among its kind", family.layer(47, model.shape).kv_layer, 35)

local shapes, count = t.tensors(model)
t.same("tensors", count, 18730)
t.same("embedding", shapes["model.embed_tokens.weight"], "[262144, 2048]")
t.same("final norm", shapes["model.norm.weight"], "[2048]")
t.same("q", shapes["model.layers.48.self_attn.q_proj.weight"], "[4096, 2048]")
t.same("v", shapes["model.layers.0.self_attn.v_proj.weight"], "[512, 2048]")
t.same("o", shapes["model.layers.7.self_attn.o_proj.weight"], "[2048, 4096]")
t.same("dense down", shapes["model.layers.0.mlp.down_proj.weight"], "[2048, 3072]")
t.same("router", shapes["model.layers.1.mlp.gate.weight"], "[128, 2048]")
t.same("expert down", shapes["model.layers.48.mlp.experts.127.down_proj.weight"], "[2048, 768]")
t.same("no dense experts", shapes["model.layers.0.mlp.experts.0.down_proj.weight"], nil)

-- ---- the toy: its index and its config.json (JSON is YAML)

local FOLDER = "examples/nmc-toy/"
model = t.load("specs/nmc-toy.yaml")
local function get(node, key)
  for _, item in ipairs(node and node.items or {}) do
    if item.key.value == key then return item.value end
  end
end

local index = get(yaml.load(FOLDER .. "model.safetensors.index.json"), "weight_map")
local missing, extra = t.tensors(model), {}
for _, item in ipairs(index.items) do
  if missing[item.key.value] then
    missing[item.key.value] = nil
  else
    extra[#extra + 1] = item.key.value
  end
end
t.same("the toy has every tensor", next(missing), nil)
t.same("the toy has no other tensor", table.concat(extra, " "), "")

local config = yaml.load(FOLDER .. "config.json")
local function find(path)
  local node = config
  for key in path:gmatch("[^.]+") do node = get(node, key) end
  return node and node.value ~= "null" and node or nil
end
local function agrees(node, want)
  if type(want.value) == "table" then
    for i, value in ipairs(want.value) do
      if not node.items[i] or node.items[i].value ~= value then return false end
    end
    return #node.items == #want.value
  end
  if type(want.value) == "number" then return tonumber(node.value) == want.value end
  return node.value == tostring(want.value)
end
for _, want in ipairs(families.config(model)) do
  local node, other = find(want.path), want.or_path and find(want.or_path)
  local ok = (node or other or not want.required) and (not node or agrees(node, want))
    and (not other or agrees(other, want))
  t.case("config.json: " .. want.path, ok, "other value, or missing")
end

t.done()
