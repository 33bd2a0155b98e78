-- config.json of a checkpoint, read by the rows of a family's shape (family.lua).
--
-- What the file says is taken, or refused by its key; what is taken where it is silent, and keys that neither the
-- family nor the tables here know, are listed for whoever writes the spec.  Nothing is dropped without a word.
local diags = require("diag")
local families = require("family")
local json = require("json")
local rows = require("rows")

local M = {}

-- ---------------------------------------------------------------- keys of config.json that no family has to state

-- Values at which a key changes nothing; others are refused where the family does not state the key.
local NEUTRAL = {
  { "attention_bias", false }, { "qkv_bias", false }, { "mlp_bias", false }, { "use_bias", false },
  { "bias", false }, { "lm_head_bias", false }, { "hidden_act", "silu", "swish" }, { "hidden_activation", "silu" },
  { "use_gated_activation", true }, { "use_embedding_sharing", true },
  { "order_of_interleaved_layers", "local_attn_first" }, { "rotary_pct", 1 }, { "partial_rotary_factor", 1 },
  { "rope_interleaved", false }, { "position_embedding_type", "rope", "rope_gptj" }, { "alibi", false },
  { "no_rope_layers" }, { "no_rope_layer_interval", 0 }, { "attn_logit_softcapping" }, { "final_logit_softcapping" },
  { "logits_soft_cap" }, { "query_pre_attn_scalar" }, { "logit_scale", 1 }, { "logits_scaling", 1 },
  { "embedding_multiplier", 1 }, { "residual_multiplier", 1 }, { "attention_multiplier" }, { "scale_emb", 1 },
  { "scale_depth" }, { "clip_qkv" }, { "use_qk_norm", false }, { "qk_norm", false }, { "qk_layernorm", false },
  { "norm_topk_prob" }, { "num_experts", 0 }, { "num_local_experts", 0 }, { "n_routed_experts", 0 },
  { "num_shared_experts", 0 }, { "n_shared_experts", 0 }, { "shared_expert_intermediate_size", 0 },
  { "decoder_sparse_step", 1 }, { "mlp_only_layers", {} }, { "moe_layer_freq", 1 }, { "first_k_dense_replace", 0 },
  { "prefix_dense_sliding_window_pattern", 1 }, { "routed_scaling_factor", 1 }, { "use_sliding_window", false },
  { "attention_chunk_size" }, { "use_parallel_residual", false }, { "use_parallel_block", false },
  { "num_nextn_predict_layers", 0 }, { "is_encoder_decoder", false }, { "add_cross_attention", false },
  { "text_config" }, { "vision_config" }, { "audio_config" }, { "compression_config" },
}

-- Keys about training, generation, the tokenizer and other programs.
local IRRELEVANT = {
  "_name_or_path", "_attn_implementation_autoset", "architectures", "attention_dropout", "bos_token_id",
  "cache_implementation", "chunk_size_feed_forward", "dtype", "embd_pdrop", "eos_token_id", "finetuning_task",
  "gradient_checkpointing", "hidden_dropout", "id2label", "initializer_range", "is_llama_config", "label2id",
  "max_window_layers", "model_type", "output_attentions", "output_hidden_states", "output_router_logits",
  "pad_token_id", "pretraining_tp", "problem_type", "resid_pdrop", "return_dict", "router_aux_loss_coef",
  "router_jitter_noise", "torch_dtype", "torchscript", "transformers_version", "unsloth_fixed", "use_cache",
  "use_parallel_embedding",
}

local function set(list)
  local found = {}
  for _, key in ipairs(list or {}) do found[key] = true end
  return found
end

-- As the runtime compares them: a double that was written from a float is the same number.
local function same(a, b)
  if type(a) == "number" and type(b) == "number" then
    return a == b or math.abs(a - b) <= 1e-6 * math.max(math.abs(a), math.abs(b))
  end
  if type(a) ~= "table" or type(b) ~= "table" then return a == b end
  for i = 1, math.max(#a, #b) do
    if not same(a[i], b[i]) then return false end
  end
  return true
end

M.same = same

-- ---------------------------------------------------------------- reading

local Config = {}
Config.__index = Config

--- A mistake at a node of the file, or about a key that it lacks.
function Config:error(node, fmt, ...)
  self.diag:error(json.pos(node or self.root), "%s", fmt:format(...))
end

--- The node at a path with dots, nil where it is absent or null; `rope_type` is also spelt `type`.
function Config:at(path)
  local node = self.root
  for key in path:gmatch("[^.]+") do
    local by = node.by
    if not by then return nil end
    node = by[key]
    if not node and key == "rope_type" then
      path, node = path:gsub("rope_type$", "type"), by.type
    end
    if not node or node.kind == "null" then return nil end
  end
  self.read[path] = true
  return node, path
end

-- The places of a fact: its path, and those of or_path, which has | between them.
local function places(path, or_path)
  local list = { path }
  for other in (or_path or ""):gmatch("[^|]+") do list[#list + 1] = other end
  return list
end

-- The node at the first place that has one.  Several may: then they agree.
function Config:either(path, or_path)
  local node, where
  for _, place in ipairs(places(path, or_path)) do
    local other, there = self:at(place)
    if node and other and not same(json.plain(node), json.plain(other)) then
      self:error(other, "%s is %s, but %s is %s", there, json.text(other), where, json.text(node))
    elseif not node then
      node, where = other, there
    end
  end
  return node, where
end

-- What a row takes, for a message.
local function wanted(row)
  return row[2] == "bool" and "true or false" or rows.expected(row)
end

-- A plain value as the row's; nil where it cannot be.
local function convert(value, row)
  if row[2] == "bool" then
    if type(value) == "boolean" then return value end
  elseif row[2] == "word" then
    for _, choice in ipairs(row.choices) do
      if value == choice then return value end
    end
  elseif type(value) == "number" then
    if row[2] == "int" then value = math.tointeger(value) else value = value + 0.0 end
    if value and value >= row.min and value <= row.max then return value end
  end
end

-- What the family's from_config finds: whether it found or said anything, the value, and a comment.
function Config:derive(row, shape)
  local ok, plain, how = pcall(row.from_config, function(path) return json.plain((self:at(path))) end, shape)
  if ok and plain == nil then return false end
  local value
  if ok then value = convert(plain, row) end
  how = how or "by config.json"
  if not ok then
    if self.diag:count() == 0 then error(plain, 0) end          -- else it lacks what was refused
  elseif value == nil then
    self:error(nil, "%s: expected %s, got %s (%s)", row[1], wanted(row), json.text(plain), how)
  end
  return true, value, how
end

-- What is taken where config.json is silent: the value and a comment, nil where it may not be silent.
function Config:absent(row, shape)
  if row.config_tensor and self.tensors then
    local there = self.tensors.by[row.config_tensor] ~= nil
    return not there, ("no %s: %s is %s the tensors"):format(row.config, row.config_tensor,
      there and "among" or "not among")
  end
  if row.config then
    local ok, default = pcall(families.config_default, row, shape)
    if not ok and self.diag:count() == 0 then error(default, 0) end
    local value
    if ok then value = convert(default, row) end
    return value, ("no %s: %s"):format(row.config, row.config_note or "default of transformers' class")
  end
  return row.default, "not in config.json: default of nmkgen"
end

-- One key of shape: its value, where it comes from as a comment, where the file has it (node and path), whether it has
-- it not.  nil after a message.
function Config:value(row, shape)
  local node, where
  if row.config then node, where = self:either(row.config, row.or_config) end
  if node then
    local plain = json.plain(node)
    local value = convert(plain, row)
    if value == nil and row.config_check == false and math.type(plain) == "integer" and plain > row.max then
      return row.max, ("%s is %d, more than nmkgen takes"):format(where, plain), node, where
    elseif value == nil then
      self:error(node, "%s: expected %s, got %s", where, wanted(row), json.text(node))
    end
    return value, where, node, where
  end
  if row.from_config then
    local found, value, how = self:derive(row, shape)
    if found then return value, how end
  end
  local value, how = self:absent(row, shape)
  if value ~= nil then return value, how, nil, nil, true end
  if row.config then
    self:error(nil, "%s is missing; it gives %s: %s", row.config, row[1], row.doc)
  else
    self:error(nil, "nothing gives %s: %s", row[1], row.doc)
  end
end

--- The family whose model_type the file has, of `list`; nil after a message.
function Config:find_family(list)
  local known, by_type = {}, {}
  for _, family in ipairs(list) do
    for _, name in ipairs(family.model_types) do
      known[#known + 1] = name
      by_type[name] = family
    end
  end
  local node = self:at("model_type")
  if not node then
    self:error(nil, "model_type is missing; known are: %s", table.concat(known, ", "))
  elseif node.kind ~= "string" then
    self:error(node, "model_type: expected a text, got %s", json.text(node))
  elseif by_type[node.value] then
    self.family = by_type[node.value]
  else
    local near = diags.nearest(node.value, known)
    self:error(node, "model_type: no family is for %s%s; known are: %s", json.text(node),
      near and (", the nearest name is '%s'"):format(near) or "", table.concat(known, ", "))
  end
  return self.family
end

--- What concerns every family.
function Config:check_common()
  local architectures = self:at("architectures")
  if architectures and architectures.kind ~= "array" then
    self:error(architectures, "architectures: expected a list, got %s", json.text(architectures))
  end
  for _, node in ipairs(architectures and architectures.kind == "array" and architectures.items or {}) do
    if node.kind ~= "string" or not node.value:find("ForCausalLM$") then
      self:error(node, "architectures: %s is not supported, only models ...ForCausalLM are", json.text(node))
    end
  end
  local quantization = self:at("quantization_config")
  if quantization then
    local method = quantization.by and quantization.by.quant_method
    self:error(quantization, "quantization_config: %s is not supported; weights must be bfloat16",
      json.text(method or quantization))
  end
  local dtype, where = self:either("torch_dtype", "dtype")
  self.dtype = dtype
  if dtype and dtype.value ~= "bfloat16" and not quantization then
    self:error(dtype, "%s: %s is not supported; weights must be bfloat16", where, json.text(dtype))
  end
end

--- The values of shape, and whether all are there; mistakes are in diag.  tensors: of checkpoint.lua, or nil.  Leaves
--- in self.from, by key, { comment, node, where, absent }: where the value comes from.
function Config:shape(tensors)
  local shape, complete = {}, true
  self.tensors = tensors
  for _, row in ipairs(self.family.shape) do
    local value, comment, node, where, absent = self:value(row, shape)
    shape[row[1]], complete = value, complete and value ~= nil
    self.from[row[1]] = { comment = comment, node = node, where = where or row[1], absent = absent }
    if row.config then self:state(row.config, row.or_config) end
  end
  return shape, complete
end

-- ---------------------------------------------------------------- the family's other facts

-- A value that is taken where the file is silent, as text.
local function taken(value)
  if type(value) ~= "table" or #value == 0 then return json.text(value) end
  for _, item in ipairs(value) do
    if item ~= value[1] then return "what follows from the shape" end
  end
  return json.text(value[1]) .. " throughout"
end

-- The family judges what stands at these places.
function Config:state(path, or_path)
  for _, place in ipairs(places(path, or_path)) do
    self.stated[place] = true
    if place:find("%.rope_type$") then self.stated[place:gsub("rope_type$", "type")] = true end
  end
end

-- Whether the shape's value of a key is only what was taken for its absence.
function Config:is_default(path)
  for _, row in ipairs(self.family.shape) do
    if row.config == path then return self.from[row[1]].absent end
  end
end

-- The map that lacks a fact, where one of its places has such a map.
function Config:parent(path, or_path)
  for _, place in ipairs(places(path, or_path)) do
    local map = self:at(place:match("^(.*)%.") or place)
    if map then return map end
  end
end

-- Facts against the file.  Leaves in self.stated the paths that the family judges.
function Config:check_facts(facts)
  local from_shape = {}
  for _, row in ipairs(self.family.shape) do from_shape[row.config or row] = row.config_check ~= false end
  for _, fact in ipairs(facts) do
    self:state(fact.path, fact.or_path)
    if not from_shape[fact.path] and fact.path ~= "model_type" then
      local node, where = self:either(fact.path, fact.or_path)
      if node and not same(json.plain(node), fact.value) then
        self:contradiction(node, where, fact.value)
      elseif not node and fact.required then
        local expected = self:is_default(fact.path) and "" or (" to say " .. json.text(fact.value))
        self:error(self:parent(fact.path, fact.or_path), "%s is missing; the family %s needs it%s, and takes no "
          .. "default", fact.path, self.family.name, expected)
      elseif not node and not fact.path:find(".", 1, true) then
        self.silent[#self.silent + 1] = ("%s = %s"):format(fact.path, taken(fact.value))
      end
    end
  end
end

function Config:contradiction(node, where, value)
  self.refused[where:match("^[^.]+")] = true
  if node.kind == "array" and type(value) == "table" and #node.items ~= #value then
    self:error(node, "%s: a list of %d, here the family %s has one of %d", where, #node.items, self.family.name,
      #value)
    return
  elseif node.kind == "array" and type(value) == "table" then
    for i, item in ipairs(node.items) do
      if not same(json.plain(item), value[i]) then
        self:error(item, "%s[%d]: %s is not supported; here the family %s has %s", where, i - 1, json.text(item),
          self.family.name, json.text(value[i]))
        return
      end
    end
  end
  self:error(node, "%s: %s is not supported; the family %s has %s", where, json.text(node), self.family.name,
    json.text(value))
end

-- A window that no position reaches, or that is switched off, is none.
function Config:window_is_off(node)
  local switch, longest = self:at("use_sliding_window"), self:at("max_position_embeddings")
  if switch and switch.value == false then return true end
  return longest ~= nil and type(node.value) == "number" and type(longest.value) == "number"
    and node.value >= longest.value
end

function Config:is_neutral(key, node)
  if key == "sliding_window" then return self:window_is_off(node) end
  if key == "layer_types" then
    for _, item in ipairs(node.items or {}) do
      if item.value ~= "full_attention" then return false end
    end
    return node.kind == "array"
  end
  local row = rows.find(NEUTRAL, key)
  if not row then return nil end
  for i = 2, #row do
    if same(json.plain(node), row[i]) then return true end
  end
  return false
end

-- RoPE's map.  Where the type is the plain one, transformers looks at no other key; else every key counts.
function Config:check_rope(key, map)
  local kind = map.by.rope_type or map.by.type
  local plain = kind and kind.value == "default" or not kind and key == "rope_parameters"
  if kind and not plain and not self.stated[key .. ".rope_type"] then
    self:unsupported(kind, key .. ".rope_type")
    return
  end
  for _, item in ipairs(map.items) do
    local path, node = key .. "." .. item.key, item.value
    local neutral = self:is_neutral(item.key, node)
    if node == kind or node.kind == "null" or self.stated[path] or neutral then
      goto continue
    elseif plain and neutral == nil and node.kind ~= "object" then
      self.ignored[#self.ignored + 1] = ("%s = %s"):format(path, json.text(node))
    else
      self:unsupported(node, path)
    end
    ::continue::
  end
end

function Config:unsupported(node, path)
  local row, choices = rows.find(NEUTRAL, path:match("[^.]+$")), {}
  for i = 2, #(row or {}) do choices[#choices + 1] = json.text(row[i]) end
  self:error(node, "%s: %s changes what the model computes, and the family %s does not have it%s", path,
    json.text(node), self.family.name, #choices > 0 and "; it has " .. table.concat(choices, " or ") or "")
end

-- Keys that the file may not leave to the default of transformers' class.
function Config:check_said()
  for key, default in pairs(self.family.config_said or {}) do
    if not self.root.by[key] then
      self:error(self.root, "%s is missing; transformers' class takes %s there, and the family %s does not have it",
        key, tostring(default), self.family.name)
    end
  end
end

-- Every key of the file is stated by the family, known to change nothing, refused, or listed.
function Config:check_keys()
  local irrelevant, ignored = set(IRRELEVANT), set(self.family.config_ignored)
  for _, item in ipairs(self.root.items) do
    local key, node = item.key, item.value
    if node.kind == "null" or self.stated[key] or irrelevant[key] or ignored[key] or key == "quantization_config" then
      goto continue
    elseif key == "rope_scaling" or key == "rope_parameters" then
      if node.kind ~= "object" then
        self:error(node, "%s: expected an object, got %s", key, json.text(node))
      elseif not self.refused[key] then
        self:check_rope(key, node)
      end
    else
      local neutral = self:is_neutral(key, node)
      if neutral == false then
        self:unsupported(node, key)
      elseif neutral == nil and not self.read[key] then
        self.ignored[#self.ignored + 1] = ("%s = %s"):format(key, json.text(node))
      end
    end
    ::continue::
  end
end

--- What the family says beside its shape, and all other keys.  facts: families.config(model).
function Config:check(facts)
  self:check_facts(facts)
  self:check_said()
  self:check_keys()
end

--- The config.json of a folder; nil after a message.
function M.load(dir, diag)
  local root = json.load(dir .. "/config.json", diag)
  return root and setmetatable({
    diag = diag, root = root, silent = {}, ignored = {}, read = {}, stated = {}, refused = {}, from = {},
  }, Config)
end

return M
