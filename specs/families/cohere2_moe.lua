-- The Cohere2 MoE family: parallel block, one RMSNorm per layer, sliding layers with RoPE, full layers without, experts
-- chosen by sigmoid scores, embedding tied to the LM head.  Facts only; no CUDA, no schedule.
--
-- What the stages read (m = the model: m.shape, m.schedule, m.target hold plain checked values):
--   shape, rules        keys of `shape:` in a spec; what must hold between them            (spec.lua)
--   waves               the waves of a layer in default order: { name, after = waves it reads from }
--   layer(i, shape)     { attention = "full"|"sliding", rope, mlp = "dense"|"moe", kv_layer = index among its kind }
--   values(m)           every number an op may name as a parameter; the stages themselves ask for layers, kv_heads,
--                       head_dim, experts, experts_per_token, full_layers, sliding_layers, max_context and window
--   buffers(m)          global activation buffers, ordered: { name, bytes, extent = size of the index space, width }
--                       width, where a buffer is one row of so many elements for each column: unit u of the index space
--                       is then elements u*width/extent and on, of all columns
--   front(m), back(m)   ordered nodes before the first and after the last layer
--   block(i, m)         nodes of layer i by wave name; waves that the layer lacks are nil
--     a node is { op, tiles | units, fields = constant task fields, weights = { task field = { array, layer } },
--     residual }
--     tiles: 16 output rows each (8 pairs for gate_up) of a spread or owner op; units: of a cyclic op.
--     Formal buffers have the actual buffer's name, except x (residual in) and y (residual out), which the graph binds:
--     with residuals = 2 a layer adds to the residual twice, and a node's residual says before which addition it
--     stands, 0 (the default) or 1
--   arrays(m)           packed weight arrays, ordered; element = layer - layer0 (then expert); see below
--   tensors(m)          checkpoint tensors, ordered: where each one's rows go in its array
--   config(m)           what a checkpoint's config.json must say: { path, or_path, value, required }
--                       null counts as absent; an absent value is a mistake only where required;
--                       or_path: another place where the same fact may stand
--   insert(m)           optional: what every model of the family inserts, as a spec does: { op, value, layers, with }
local M = {}

M.name = "cohere2_moe"
M.summary = "Cohere2 mixture of experts, parallel block (North Mini Code)"

M.shape = {
  { "layers", "int", min = 1, max = 256, doc = "transformer layers" },
  { "hidden", "int", min = 256, max = 65536, doc = "width of the residual" },
  { "heads", "int", min = 1, max = 1024, doc = "query heads" },
  { "kv_heads", "int", min = 1, max = 128, doc = "key and value heads" },
  { "head_dim", "int", min = 1, max = 1024, default = 128, doc = "width of one head" },
  { "dense_layers", "int", min = 0, max = 256, default = 1, doc = "leading layers with a dense MLP" },
  { "dense_ff", "int", min = 32, max = 1048576, doc = "width of the dense MLP" },
  { "experts", "int", min = 1, max = 4096, doc = "routed experts of a MoE layer" },
  { "experts_per_token", "int", min = 1, max = 256, doc = "experts that a token is sent to" },
  { "expert_ff", "int", min = 32, max = 1048576, doc = "width of one expert" },
  { "vocab", "int", min = 16, max = 1048576, doc = "tokens of the vocabulary" },
  { "full_attention_every", "int", min = 1, max = 256, default = 4, doc = "one layer in so many is full" },
  { "sliding_window", "int", min = 64, max = 1048576, default = 4096, doc = "keys a sliding layer sees" },
  { "rope_theta", "number", min = 1, max = 1e12, doc = "base of the rotary frequencies" },
  { "norm_eps", "number", min = 1e-12, max = 1e-2, default = 1e-6, doc = "epsilon of RMSNorm" },
  { "logit_scale", "number", min = 1e-6, max = 1e6, default = 1.0, doc = "factor of the logits" },
  { "max_context", "int", min = 64, max = 4194304, doc = "longest sequence, prompt and answer together" },
}

-- { key that is marked, test, expectation }; the message adds the values of `uses`.
M.rules = {
  { "dense_layers", function(s) return s.dense_layers < s.layers end, "less than layers", uses = { "layers" } },
  { "experts_per_token", function(s) return s.experts_per_token <= s.experts end, "at most experts",
    uses = { "experts" } },
}

M.waves = {
  { "norm", after = {} },
  { "router", after = { "norm" } },
  { "qkv", after = { "norm" } },
  { "route", after = { "router" } },
  { "attention", after = { "qkv" } },
  { "combine", after = { "attention" } },
  { "up", after = { "norm", "route" } },
  { "o_proj", after = { "combine" } },
  { "down", after = { "up" } },
  { "residual", after = { "o_proj", "down" } },
}

-- The dense prefix is full; after it the last of every full_attention_every layers is.  Dense layers always have RoPE,
-- other full layers never.
local function is_full(i, s)
  return i < s.dense_layers or (i - s.dense_layers + 1) % s.full_attention_every == 0
end

function M.layer(i, s)
  local full, kv_layer = is_full(i, s), 0
  for j = 0, i - 1 do
    if is_full(j, s) == full then kv_layer = kv_layer + 1 end
  end
  return {
    attention = full and "full" or "sliding",
    rope = not full or i < s.dense_layers,
    mlp = i < s.dense_layers and "dense" or "moe",
    kv_layer = kv_layer,
  }
end

-- Most experts that one step can touch.
local function expert_slots(m) return math.min(m.schedule.columns * m.shape.experts_per_token, m.shape.experts) end

-- Rows of the embedding, and of the router: whole tiles.
local function vocab_rows(s) return (s.vocab + 15) // 16 * 16 end
local function router_rows(s) return (s.experts + 15) // 16 * 16 end

-- Query heads of a kv head, by twos: as ops/attention.cu lays out partials.
local function group_pairs(s) return (s.heads // s.kv_heads + 1) // 2 end

local function qkv_rows(s) return (s.heads + 2 * s.kv_heads) * s.head_dim end

function M.values(m)
  local s, full = m.shape, 0
  for i = 0, s.layers - 1 do
    if is_full(i, s) then full = full + 1 end
  end
  local part_slots = m.schedule.columns * s.kv_heads * m.schedule.split.chunks_max
  return {
    layers = s.layers, hidden = s.hidden, heads = s.heads, kv_heads = s.kv_heads, head_dim = s.head_dim,
    q_width = s.heads * s.head_dim, dense_ff = s.dense_ff, experts = s.experts,
    experts_per_token = s.experts_per_token, expert_ff = s.expert_ff, expert_slots = expert_slots(m), vocab = s.vocab,
    vocab_rows = vocab_rows(s), norm_mean = 0, route_score = 0,
    window = s.sliding_window, eps = s.norm_eps, logit_scale = s.logit_scale, max_context = s.max_context,
    full_layers = full, sliding_layers = s.layers - full,
    rope_halves = 0, qk_norm = 0, qkv_bias = 0,
    part_slots = part_slots,
    attn_units = m.schedule.columns * s.kv_heads * group_pairs(s) * (s.head_dim // 16),   -- as ops/combine.cu counts
    h_units = expert_slots(m) * (s.expert_ff // 8),         -- as ops/expert_up.cu claims
  }
end

function M.buffers(m)
  local s, cols, v = m.shape, m.schedule.columns, M.values(m)
  return {
    { name = "x0", bytes = cols * s.hidden * 4, extent = s.hidden, width = s.hidden },
    { name = "x1", bytes = cols * s.hidden * 4, extent = s.hidden, width = s.hidden },
    { name = "logits", bytes = cols * router_rows(s) * 4, extent = router_rows(s), width = router_rows(s) },
    { name = "qkv", bytes = cols * qkv_rows(s) * 2, extent = qkv_rows(s), width = qkv_rows(s) },
    { name = "part", bytes = v.part_slots * group_pairs(s) * (2 * s.head_dim + 4) * 4, extent = v.part_slots },
    { name = "attn", bytes = cols * v.q_width * 2, extent = v.attn_units },
    { name = "h", bytes = v.expert_slots * cols * s.expert_ff * 2, extent = v.h_units },
    { name = "dense_h", bytes = cols * s.dense_ff * 2, extent = s.dense_ff, width = s.dense_ff },
    { name = "cand", bytes = m.target.sms * 2 * cols * 8, extent = m.target.sms },
    { name = "scores", bytes = cols * v.vocab_rows * 4, extent = v.vocab_rows // 16, width = v.vocab_rows },
    { name = "raw_logits", bytes = cols * v.vocab_rows * 4, extent = v.vocab_rows // 16, width = v.vocab_rows },
    { name = "cuts", bytes = 7 * cols * 256 * 8, extent = 7 * cols },           -- as ops/cut.cu counts
    { name = "drawn", bytes = m.target.sms * 8, extent = m.target.sms },
    { name = "tops", bytes = m.target.sms * cols * 41 * 4, extent = m.target.sms }, -- as ops/draw.cu lays them out
    { name = "squares", bytes = 4, extent = 1 },                                -- of qkv, which has no use for it here
  }
end

function M.front(m)
  return {
    { op = "embed", tiles = m.shape.hidden // 16, weights = { weight_kib = { array = "embed", layer = 0 } } },
    { op = "clear_cuts" },
  }
end

function M.back(m)
  local s = m.shape
  local nodes = {
    { op = "norm", weights = { gamma_kib = { array = "norm", layer = s.layers } } },
    { op = "lm_head", tiles = vocab_rows(s) // 16, weights = { weight_kib = { array = "embed", layer = 0 } } },
  }
  -- Three digits of where top_k cuts, three of where top_p does.
  for unit = 0, 5 do
    nodes[#nodes + 1] = { op = "cut", fields = { unit = unit } }
  end
  nodes[#nodes + 1] = { op = "draw", tiles = vocab_rows(s) // 16 }
  nodes[#nodes + 1] = { op = "sample" }
  return nodes
end

function M.block(i, m)
  local s, kind, v = m.shape, M.layer(i, m.shape), M.values(m)
  local sliding = kind.attention == "sliding" and 1 or 0
  local function from(array) return { weight_kib = { array = array, layer = i } } end
  local block = {
    norm = { op = "norm", weights = { gamma_kib = { array = "norm", layer = i } } },
    qkv = { op = "qkv", tiles = qkv_rows(s) // 16, weights = from("qkv"),
            fields = { rope = kind.rope and 1 or 0, sliding = sliding, kv_layer = kind.kv_layer, bias_kib = 0,
                       gamma_kib = 0 } },
    attention = { op = "attention", fields = { sliding = sliding, kv_layer = kind.kv_layer } },
    combine = { op = "combine", units = v.attn_units, fields = { sliding = sliding } },
    o_proj = { op = "o_proj", tiles = s.hidden // 16, weights = from("o") },
    residual = { op = "residual", tiles = s.hidden // 16 },
  }
  if kind.mlp == "dense" then
    block.up = { op = "dense_up", tiles = s.dense_ff // 8, weights = from("dense_up") }
    block.down = { op = "dense_down", tiles = s.hidden // 16, weights = from("dense_down") }
  else
    block.router = { op = "router", tiles = router_rows(s) // 16, weights = from("router") }
    block.route = { op = "route", fields = { ticket = i } }
    block.up = { op = "expert_up", weights = from("up"), fields = { ticket = i } }  -- rank: the schedule's
    block.down = { op = "expert_down", tiles = s.hidden // 16, weights = from("down") }
  end
  return block
end

-- experts = 0: no expert dimension.  gate_up: gate rows, then up rows; vector: one row, not a matrix.
function M.arrays(m)
  local s = m.shape
  local dense, moe = s.dense_layers, s.layers - s.dense_layers
  local list = {}
  local function array(name, layer0, layers, experts, rows, cols, layout)
    if layers > 0 then
      list[#list + 1] = { name = name, layer0 = layer0, layers = layers, experts = experts, rows = rows, cols = cols,
                          layout = layout }
    end
  end
  array("embed", 0, 1, 0, vocab_rows(s), s.hidden, "rows")
  array("norm", 0, s.layers + 1, 0, 1, s.hidden, "vector")                         -- the last one is the final norm
  array("qkv", 0, s.layers, 0, qkv_rows(s), s.hidden, "pairs")
  array("o", 0, s.layers, 0, s.hidden, s.heads * s.head_dim, "rows")
  array("dense_up", 0, dense, 0, 2 * s.dense_ff, s.hidden, "gate_up")
  array("dense_down", 0, dense, 0, s.hidden, s.dense_ff, "rows")
  array("router", dense, moe, 0, router_rows(s), s.hidden, "rows")
  array("up", dense, moe, s.experts, 2 * s.expert_ff, s.hidden, "gate_up")
  array("down", dense, moe, s.experts, s.hidden, s.expert_ff, "rows")
  return list
end

-- %d in a name: the layer, then the expert.  Layer n goes to the array's element of layer n.  dims: 1 for a vector.
function M.tensors(m)
  local s = m.shape
  local dense, moe = s.dense_layers, s.layers - s.dense_layers
  local q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
  local list = {}
  local function tensor(name, layer0, layers, experts, rows, cols, array, row0)
    if layers > 0 then
      list[#list + 1] = { name = name, layer0 = layer0, layers = layers, experts = experts, rows = rows, cols = cols,
                          dims = rows == 1 and 1 or 2, array = array, row0 = row0 or 0 }
    end
  end
  local layer, mlp = "model.layers.%d.", "model.layers.%d.mlp."
  tensor("model.embed_tokens.weight", 0, 1, 0, s.vocab, s.hidden, "embed")
  tensor("model.norm.weight", s.layers, 1, 0, 1, s.hidden, "norm")
  tensor(layer .. "input_layernorm.weight", 0, s.layers, 0, 1, s.hidden, "norm")
  tensor(layer .. "self_attn.q_proj.weight", 0, s.layers, 0, q, s.hidden, "qkv")
  tensor(layer .. "self_attn.k_proj.weight", 0, s.layers, 0, kv, s.hidden, "qkv", q)
  tensor(layer .. "self_attn.v_proj.weight", 0, s.layers, 0, kv, s.hidden, "qkv", q + kv)
  tensor(layer .. "self_attn.o_proj.weight", 0, s.layers, 0, s.hidden, q, "o")
  tensor(mlp .. "gate_proj.weight", 0, dense, 0, s.dense_ff, s.hidden, "dense_up")
  tensor(mlp .. "up_proj.weight", 0, dense, 0, s.dense_ff, s.hidden, "dense_up", s.dense_ff)
  tensor(mlp .. "down_proj.weight", 0, dense, 0, s.hidden, s.dense_ff, "dense_down")
  tensor(mlp .. "gate.weight", dense, moe, 0, s.experts, s.hidden, "router")
  tensor(mlp .. "experts.%d.gate_proj.weight", dense, moe, s.experts, s.expert_ff, s.hidden, "up")
  tensor(mlp .. "experts.%d.up_proj.weight", dense, moe, s.experts, s.expert_ff, s.hidden, "up", s.expert_ff)
  tensor(mlp .. "experts.%d.down_proj.weight", dense, moe, s.experts, s.hidden, s.expert_ff, "down")
  return list
end

-- The class defaults of this model type are other than what its checkpoints use, so most keys are required.
function M.config(m)
  local s = m.shape
  local attention, mlp = {}, {}
  for i = 0, s.layers - 1 do
    local kind = M.layer(i, s)
    attention[i + 1] = kind.attention == "full" and "full_attention" or "sliding_attention"
    mlp[i + 1] = kind.mlp == "dense" and "dense" or "sparse"
  end
  local list = {}
  local function must(path, value, or_path)
    list[#list + 1] = { path = path, or_path = or_path, value = value, required = true }
  end
  local function may(path, value)
    list[#list + 1] = { path = path, value = value, required = false }
  end
  must("model_type", "cohere2_moe")
  must("hidden_size", s.hidden)
  must("num_hidden_layers", s.layers)
  must("num_attention_heads", s.heads)
  must("num_key_value_heads", s.kv_heads)
  must("head_dim", s.head_dim)
  must("intermediate_size", s.expert_ff)
  must("prefix_dense_intermediate_size", s.dense_ff)
  must("first_k_dense_replace", s.dense_layers)
  must("num_experts", s.experts)
  must("num_experts_per_tok", s.experts_per_token)
  must("vocab_size", s.vocab)
  must("sliding_window", s.sliding_window)
  must("rope_theta", s.rope_theta, "rope_parameters.rope_theta")
  must("rms_norm_eps", s.norm_eps)                                       -- its presence selects RMSNorm
  must("logit_scale", s.logit_scale)
  must("norm_topk_prob", false)
  must("expert_selection_fn", "sigmoid")
  may("num_shared_experts", 0)
  may("attention_bias", false)
  may("use_qk_norm", false)
  may("use_parallel_block", true)
  may("tie_word_embeddings", true)
  may("hidden_act", "silu")
  may("rope_parameters.rope_type", "default")
  may("rope_scaling.rope_type", "default")
  may("layer_types", attention)
  may("mlp_layer_types", mlp)
  return list
end

return M
