-- What decoder-only transformers have in common: all parts of a family but its name and keys, made from a few facts.
--
--   local decoder = library("decoder")
--   local M = { name =, summary =, model_types =, shape = decoder.rows({ ... }), rules = ... }
--   return decoder.complete(M, { facts })
--
-- A part that M has already stays M's own.  The facts; each may be a function of the shape s instead:
--   sequential     true: norm, attention, addition, norm, MLP, addition; false: attention and MLP read one norm and are
--                  added together
--   layer_norm     true: LayerNorm without bias; false: RMSNorm
--   rope_halves    true: RoPE turns dimensions (i, i + head_dim/2) of a head ("rotate_half"); false: (2i, 2i+1)
--   qk_norm        true: every query and key head has an RMSNorm before RoPE
--   qkv_bias, o_bias  true: q, k and v have biases, the attention's output has one (sequential only)
--   tied           true: the LM head is the embedding
--   dense_layers   how many leading layers have a dense MLP; the others have experts
--   route          "sigmoid": of each chosen expert; "chosen": softmax over those; "all": softmax over all experts
--   attention(i, s) "full" or "sliding", default full          rotates(i, s) whether layer i has RoPE, default true
--   names          names in the checkpoint that differ from NAMES
--   config(s)      what config.json must say beside the shape: { { path, value, required =, or_path = } }
--
-- What the stages read of a family (m = the model: m.shape, m.schedule, m.target hold plain checked values):
--   model_types         the model_type of config.json by which `nmkgen init` finds the family
--   shape, rules        keys of `shape:` in a spec, where config.json states them (gen/family.lua); what must hold
--                       between them                                                       (gen/spec.lua)
--   config_ignored      keys of config.json that change nothing here; may be left out
--   config_said         keys that config.json must have, null or not, as the family lacks the value that transformers'
--                       class takes in their place: { key = value }; may be left out
--   residuals           additions to the residual in a layer; may be left out where there is one
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
--     residual = r, from = { buffer = the earlier layer that left it, -1: what is before the layers } }
--     tiles: 16 output rows each (8 pairs for gate_up) of a spread or owner op; units: of a cyclic op.
--     Formal buffers have the actual buffer's name, except x (residual in) and y (residual out), which the graph binds,
--     to what stands before and after addition r of the layer; xb and yb are the same in bf16, which all SMs exchange.
--   prefill             the same of launches that take prompts, for which m.prefill says how: waves, values(m),
--                       buffers(m), front(m), block(i, m); may be left out: then prompts go through the step
--   arrays(m)           packed weight arrays, ordered; element = layer - layer0 (then expert); see below
--   tensors(m)          checkpoint tensors, ordered: where each one's rows go in its array
--   rope(m)             the angle by which each pair of dimensions turns from one position to the next, head_dim/2 of
--                       them; scale = factor of cosine and sine
--   config(m)           what a checkpoint's config.json must say beside shape: { path, or_path, value, required }
--                       null counts as absent; an absent value is a mistake only where required;
--                       or_path: other places where the same fact may stand, with | between them
--   insert(m)           optional: what every model of the family inserts, as a spec does: { op, value, layers, with }
-- While the graph is made m.sums_logits says whether the router's logits may be sums that SMs add to (gen/graph.lua).
local rope = library("rope")

local decoder = {}

-- ---------------------------------------------------------------- keys

-- Keys that families share, by name; a family changes what is different with it, and adds what transformers takes where
-- config.json is silent, which is each model class's own.
local ROWS = {
  { "layers", "int", min = 1, max = 256, config = "num_hidden_layers", doc = "transformer layers" },
  { "hidden", "int", min = 64, max = 65536, config = "hidden_size", doc = "width of the residual" },
  { "heads", "int", min = 1, max = 1024, config = "num_attention_heads", doc = "query heads" },
  { "kv_heads", "int", min = 1, max = 128, config = "num_key_value_heads", doc = "key and value heads" },
  { "head_dim", "int", min = 1, max = 1024, config = "head_dim", doc = "width of one head" },
  { "dense_ff", "int", min = 32, max = 1048576, config = "intermediate_size", doc = "width of the MLP" },
  { "experts", "int", min = 1, max = 4096, config = "num_experts", doc = "routed experts of a layer" },
  { "experts_per_token", "int", min = 1, max = 256, config = "num_experts_per_tok",
    doc = "experts that a token is sent to" },
  { "expert_ff", "int", min = 32, max = 1048576, config = "moe_intermediate_size", doc = "width of one expert" },
  { "vocab", "int", min = 16, max = 1048576, config = "vocab_size", doc = "tokens of the vocabulary" },
  { "tied", "bool", config = "tie_word_embeddings", config_tensor = "lm_head.weight",
    doc = "the LM head is the embedding" },
  { "attention_bias", "bool", default = false, config = "attention_bias", config_default = false,
    doc = "q, k and v have biases" },
  { "sliding_window", "int", min = 64, max = 1048576, config = "sliding_window", doc = "keys a sliding layer sees" },
  { "rope_theta", "number", min = 1, max = 1e12, config = "rope_theta", or_config = "rope_parameters.rope_theta",
    doc = "base of the rotary frequencies" },
  { "norm_eps", "number", min = 1e-12, max = 1e-2, config = "rms_norm_eps", doc = "epsilon of the norms" },
  { "logit_scale", "number", min = 1e-6, max = 1e6, config = "logit_scale", doc = "factor of the logits" },
  { "max_context", "int", min = 64, max = 4194304, config = "max_position_embeddings", config_check = false,
    doc = "longest sequence, prompt and answer together" },
}

--- What most model classes take where config.json is silent.
decoder.KV_HEADS = { "kv_heads", config_default = function(s) return s.heads end, config_note = "as many as heads" }
decoder.HEAD_DIM = { "head_dim", config_default = function(s) return s.hidden // s.heads end,
                     config_note = "hidden / heads" }

-- What a row may hold (gen/family.lua).
local ROW_KEYS = {
  "min", "max", "default", "doc", "choices", "config", "or_config", "config_default", "config_note", "config_tensor",
  "config_check", "from_config",
}

local function shared_row(name)
  for _, row in ipairs(ROWS) do
    if row[1] == name then return row end
  end
  error(("rows: there is no shared key '%s'"):format(name), 3)
end

--- The rows of a shape.  In the list: the name of a shared key; such a name with what is different; a row of its own;
--- or "rope_scaling" for the keys of scaled RoPE.
function decoder.rows(list)
  local rows = {}
  for _, given in ipairs(list) do
    if given == "rope_scaling" then
      for _, row in ipairs(rope.rows) do rows[#rows + 1] = row end
    elseif type(given) == "table" and given[2] then
      rows[#rows + 1] = given
    else
      local own = type(given) == "table" and given or { given }
      local shared = shared_row(own[1])
      local row = { shared[1], shared[2] }
      for _, key in ipairs(ROW_KEYS) do
        row[key] = shared[key]
        if own[key] ~= nil then row[key] = own[key] end
      end
      rows[#rows + 1] = row
    end
  end
  return rows
end

--- Rules between shared keys, for a family's list.
decoder.RULES = {
  experts_per_token = { "experts_per_token", function(s) return s.experts_per_token <= s.experts end, "at most experts",
                        uses = { "experts" } },
}

-- ---------------------------------------------------------------- a layer

local PARALLEL = {
  { "norm", after = {} },
  { "router", after = { "norm" }, moe = true },
  { "qkv", after = { "norm" } },
  { "route", after = { "router" }, moe = true },
  { "attention", after = { "qkv" } },
  { "combine", after = { "attention" } },
  { "up", after = { "norm", "route" } },
  { "o_proj", after = { "combine" } },
  { "down", after = { "up" } },
  { "residual", after = { "o_proj", "down" } },
}

-- The router's logits come of sums that SMs add to, without a norm, or of a product with the normalised residual: a
-- layer has the waves clear_logits, router_sum and early_route, or router and route.
local SEQUENTIAL = {
  { "norm", after = {} },
  { "qkv", after = { "norm" } },
  { "clear_logits", after = { "norm" }, moe = true },
  { "attention", after = { "qkv" } },
  { "combine", after = { "attention" } },
  { "o_proj", after = { "combine" } },
  { "router_sum", after = { "o_proj", "clear_logits" }, moe = true },
  { "residual", after = { "o_proj", "router_sum" } },                  -- which hands the sum on
  { "early_route", after = { "router_sum", "residual" }, moe = true },
  { "mlp_norm", after = { "residual" } },
  { "router", after = { "mlp_norm" }, moe = true },
  { "route", after = { "router" }, moe = true },
  { "up", after = { "mlp_norm", "early_route", "route" } },
  { "down", after = { "up" } },
  { "mlp_residual", after = { "down" } },
}

-- The waves of a prefill launch, in the order in which an SM does them: what waits for a result stands behind what does
-- not, so that few SMs stand still while the last units of a wave are done.
local PREFILL_PARALLEL = {
  { "norm", after = {} },
  { "router", after = { "norm" }, moe = true },
  { "qkv", after = { "norm" } },
  { "route", after = { "router" }, moe = true },
  { "unpack", after = { "qkv" } },
  { "sort", after = { "route" }, moe = true },
  { "gather", after = { "sort" }, moe = true },
  { "up", after = { "norm", "gather" } },
  { "attention", after = { "unpack" } },
  { "down", after = { "up" } },
  { "o_proj", after = { "attention" } },
}

local PREFILL_SEQUENTIAL = {
  { "norm", after = {} },
  { "qkv", after = { "norm" } },
  { "unpack", after = { "qkv" } },
  { "attention", after = { "unpack" } },
  { "o_proj", after = { "attention" } },
  { "mlp_norm", after = { "o_proj" } },
  { "router", after = { "mlp_norm" }, moe = true },
  { "route", after = { "router" }, moe = true },
  { "sort", after = { "route" }, moe = true },
  { "gather", after = { "sort" }, moe = true },
  { "up", after = { "mlp_norm", "gather" } },
  { "down", after = { "up" } },
}

local ROUTES = { sigmoid = 0, chosen = 1, all = 2 }

local function has_key(M, name)
  for _, row in ipairs(M.shape) do
    if row[1] == name then return true end
  end
  return false
end

local function waves_of(all, moe)
  local waves, of_moe = {}, {}
  for _, wave in ipairs(all) do of_moe[wave[1]] = wave.moe end
  for _, wave in ipairs(all) do
    if moe or not wave.moe then
      local after = {}
      for _, before in ipairs(wave.after) do
        if moe or not of_moe[before] then after[#after + 1] = before end
      end
      waves[#waves + 1] = { wave[1], after = after }
    end
  end
  return waves
end

-- Of a prefill launch: most rows whose prompts one chunk may hold; keys of a tile of attention.
local SPANS, KEY_TILE = 64, 128

local function round_up(n, unit) return (n + unit - 1) // unit * unit end

-- Rows of the embedding, and of the router: whole tiles.
local function vocab_rows(s) return round_up(s.vocab, 16) end
local function router_rows(s) return round_up(s.experts, 16) end

-- Of the sums that make the router's logits: additions to one place come one after the other.
local LOGIT_COPIES = 4

-- Query heads of a kv head, by twos: as ops/attention.cu lays out partials.
local function group_pairs(s) return (s.heads // s.kv_heads + 1) // 2 end

local function qkv_rows(s) return (s.heads + 2 * s.kv_heads) * s.head_dim end

-- Most experts that one step can touch.
local function expert_slots(m)
  return m.shape.experts and math.min(m.schedule.columns * m.shape.experts_per_token, m.shape.experts) or 0
end

-- ---------------------------------------------------------------- names in a checkpoint

-- %d: the layer, then the expert.
local LAYER = "model.layers.%d."
local NAMES = {
  embed = "model.embed_tokens.weight", head = "lm_head.weight", final_norm = "model.norm.weight",
  norm = LAYER .. "input_layernorm.weight", mlp_norm = LAYER .. "post_attention_layernorm.weight",
  q = LAYER .. "self_attn.q_proj.weight", k = LAYER .. "self_attn.k_proj.weight",
  v = LAYER .. "self_attn.v_proj.weight", o = LAYER .. "self_attn.o_proj.weight",
  q_bias = LAYER .. "self_attn.q_proj.bias", k_bias = LAYER .. "self_attn.k_proj.bias",
  v_bias = LAYER .. "self_attn.v_proj.bias", o_bias = LAYER .. "self_attn.o_proj.bias",
  q_norm = LAYER .. "self_attn.q_norm.weight", k_norm = LAYER .. "self_attn.k_norm.weight",
  gate = LAYER .. "mlp.gate_proj.weight", up = LAYER .. "mlp.up_proj.weight", down = LAYER .. "mlp.down_proj.weight",
  router = LAYER .. "mlp.gate.weight", expert_gate = LAYER .. "mlp.experts.%d.gate_proj.weight",
  expert_up = LAYER .. "mlp.experts.%d.up_proj.weight", expert_down = LAYER .. "mlp.experts.%d.down_proj.weight",
}

-- ---------------------------------------------------------------- the parts

local function number(yes) return yes and 1 or 0 end

--- Adds to M what it lacks of a family, by these facts.
function decoder.complete(M, facts)
  local moe = has_key(M, "experts")
  local parts = {}

  local function fact(name, s)
    local value = facts[name]
    if type(value) == "function" then return value(s) end
    return value
  end
  local function dense_layers(s) return not moe and s.layers or fact("dense_layers", s) or 0 end
  local function attention(i, s) return facts.attention and facts.attention(i, s) or "full" end
  local function name_of(what) return facts.names and facts.names[what] or NAMES[what] end

  -- Whether SMs add up the router's logits, each for its rows of the residual. Not with more columns than a product
  -- has: the sums are many then, and a launch is long.
  local function summable(m)
    return moe and facts.sequential and not facts.layer_norm and not fact("o_bias", m.shape) and m.sums_logits
      and m.schedule.columns <= 8 or false
  end
  -- What tells by itself that it is there cannot be a sum.
  local function summed(m) return summable(m) and m.schedule.exchange ~= "validated" end
  local function logit_units(m)                                         -- as ops/router_sum.cu counts
    return summed(m) and LOGIT_COPIES * m.schedule.columns or router_rows(m.shape)
  end

  parts.rules = {}
  parts.residuals = facts.sequential and 2 or nil
  parts.waves = waves_of(facts.sequential and SEQUENTIAL or PARALLEL, moe)

  function parts.layer(i, s)
    local kv_layer = 0
    for j = 0, i - 1 do
      if attention(j, s) == attention(i, s) then kv_layer = kv_layer + 1 end
    end
    return {
      attention = attention(i, s),
      rope = not facts.rotates or facts.rotates(i, s),
      mlp = i < dense_layers(s) and "dense" or "moe",
      kv_layer = kv_layer,
    }
  end

  -- Whether attention takes four pages a turn, and K of the first ones before q is there: where all wait for it, chunks
  -- are cut for that, and there are registers.
  local function turns(m)
    local s = m.shape
    return facts.sequential and s.heads // s.kv_heads <= 8 and s.head_dim == 128 and m.schedule.columns <= 8
      and m.schedule.claim.attention == "static" and m.schedule.split.own_pages > 0
  end

  function parts.values(m)
    local s, full = m.shape, 0
    for i = 0, s.layers - 1 do
      if attention(i, s) == "full" then full = full + 1 end
    end
    local part_slots = m.schedule.columns * s.kv_heads * m.schedule.split.chunks_max
    return {
      layers = s.layers, hidden = s.hidden, heads = s.heads, kv_heads = s.kv_heads, head_dim = s.head_dim,
      q_width = s.heads * s.head_dim, dense_ff = s.dense_ff or 0, experts = s.experts or 0,
      experts_per_token = s.experts_per_token or 0, expert_ff = s.expert_ff or 0, expert_slots = expert_slots(m),
      vocab = s.vocab, vocab_rows = vocab_rows(s), window = s.sliding_window or s.max_context, eps = s.norm_eps,
      logit_scale = s.logit_scale or 1.0, max_context = s.max_context, dense_layers = dense_layers(s),
      full_layers = full, sliding_layers = s.layers - full,
      rope_halves = number(facts.rope_halves), qk_norm = number(fact("qk_norm", s)),
      qkv_bias = number(fact("qkv_bias", s)), norm_mean = number(facts.layer_norm),
      route_score = ROUTES[fact("route", s) or "sigmoid"], summed = number(summable(m)),
      logit_copies = LOGIT_COPIES, logit_units = moe and logit_units(m) or 0,
      part_slots = part_slots, sequential = number(facts.sequential), turns = number(turns(m)),
      attn_units = m.schedule.columns * s.kv_heads * group_pairs(s) * (s.head_dim // 16),  -- as ops/combine.cu counts
      h_units = expert_slots(m) * ((s.expert_ff or 0) // 8),           -- as ops/expert_up.cu claims
    }
  end

  function parts.buffers(m)
    local s, cols, v = m.shape, m.schedule.columns, M.values(m)
    local list = {}
    local function buffer(name, bytes, extent) list[#list + 1] = { name = name, bytes = bytes, extent = extent } end
    -- A row of `width` elements for each column.
    local function row(name, width, element_bytes, extent)
      buffer(name, cols * width * element_bytes, extent or width)
      list[#list].width = width
    end
    row("x0", s.hidden, 4)
    row("x1", s.hidden, 4)
    row("xb0", s.hidden, 2)
    row("xb1", s.hidden, 2)
    if moe and summed(m) then buffer("logits", logit_units(m) * (router_rows(s) + 2) * 8, logit_units(m)) end
    if moe and not summed(m) then row("logits", router_rows(s), 4) end
    row("qkv", qkv_rows(s), 2)
    buffer("part", v.part_slots * group_pairs(s) * (2 * s.head_dim + 4) * 4, v.part_slots)
    buffer("attn", cols * v.q_width * 2, v.attn_units)
    if moe then
      -- Where its words tell that they are there, ops/route.cu gives each column a row for each expert that it chooses.
      local posted = m.schedule.exchange == "validated"
      local rows = (posted and s.experts_per_token or v.expert_slots) * cols
      buffer("h", rows * s.expert_ff * 2, v.h_units)
    end
    if s.dense_ff then row("dense_h", s.dense_ff, 2) end
    buffer("cand", m.target.sms * 2 * cols * 8, m.target.sms)
    row("scores", v.vocab_rows, 4, v.vocab_rows // 16)
    row("raw_logits", v.vocab_rows, 4, v.vocab_rows // 16)
    buffer("cuts", 7 * cols * 256 * 8, 7 * cols)                        -- as ops/cut.cu counts
    buffer("drawn", m.target.sms * 8, m.target.sms)
    buffer("tops", m.target.sms * cols * 41 * 4, m.target.sms)          -- as ops/draw.cu lays them out
    local row_tiles = v.qk_norm == 1 and qkv_rows(s) // 16 or 1
    buffer("squares", cols * row_tiles * 4, row_tiles)                  -- of qkv, unused without qk_norm
    return list
  end

  function parts.front(m)
    return {
      { op = "embed", tiles = m.shape.hidden // 16, weights = { weight_kib = { array = "embed", layer = 0 } } },
      { op = "clear_cuts" },
    }
  end

  function parts.back(m)
    local s = m.shape
    local head = fact("tied", s) and "embed" or "head"
    local nodes = {
      { op = "norm", weights = { gamma_kib = { array = "norm", layer = s.layers } } },
      { op = "lm_head", tiles = vocab_rows(s) // 16, weights = { weight_kib = { array = head, layer = 0 } } },
    }
    -- Three digits of where top_k cuts, three of where top_p does.
    for unit = 0, 5 do
      nodes[#nodes + 1] = { op = "cut", fields = { unit = unit } }
    end
    nodes[#nodes + 1] = { op = "draw", tiles = vocab_rows(s) // 16 }
    nodes[#nodes + 1] = { op = "sample" }
    return nodes
  end

  function parts.block(i, m)
    local s, kind, v = m.shape, M.layer(i, m.shape), M.values(m)
    local sliding = number(kind.attention == "sliding")
    local function from(array) return { weight_kib = { array = array, layer = i } } end
    local function norm(array, residual)
      return { op = "norm", residual = residual, weights = { gamma_kib = { array = array, layer = i } } }
    end
    local qkv = { weight_kib = { array = "qkv", layer = i } }
    local qkv_fields = { rope = number(kind.rope), sliding = sliding, kv_layer = kind.kv_layer }
    -- A field without its array is a constant 0.
    local function vector(field, array, present)
      if present then qkv[field] = { array = array, layer = i } else qkv_fields[field] = 0 end
    end
    vector("bias_kib", "qkv_bias", fact("qkv_bias", s))
    vector("gamma_kib", "qk_norm", fact("qk_norm", s))
    local block = {
      norm = norm("norm"),
      qkv = { op = "qkv", tiles = qkv_rows(s) // 16, weights = qkv, fields = qkv_fields },
      attention = { op = "attention", fields = { sliding = sliding, kv_layer = kind.kv_layer } },
      combine = { op = "combine", units = v.attn_units, fields = { sliding = sliding } },
      o_proj = { op = "o_proj", tiles = s.hidden // 16, weights = from("o") },
      residual = { op = "residual", tiles = s.hidden // 16 },
    }
    if fact("o_bias", s) then
      block.residual.op = "residual_bias"
      block.residual.weights = { bias_kib = { array = "o_bias", layer = i } }
    end
    if facts.sequential then
      block.mlp_norm = norm("mlp_norm", 1)
      block.mlp_residual = { op = "residual", tiles = s.hidden // 16, residual = 1 }
    end
    if kind.mlp == "dense" then
      block.up = { op = "dense_up", tiles = s.dense_ff // 8, weights = from("dense_up") }
      block.down = { op = "dense_down", tiles = s.hidden // 16, weights = from("dense_down") }
    else
      local route = { op = "route", fields = { ticket = i } }
      if summed(m) then
        block.clear_logits = { op = "clear_logits" }
        block.router_sum = { op = "router_sum", tiles = s.hidden // 16, weights = from("router") }
        block.router_sum.weights.gamma_kib = { array = "mlp_norm", layer = i }
        block.early_route = route
      else
        block.router = { op = "router", tiles = router_rows(s) // 16, weights = from("router") }
        block.route = route
      end
      block.up = { op = "expert_up", weights = from("up"), fields = { ticket = i } }  -- rank: the schedule's
      block.down = { op = "expert_down", tiles = s.hidden // 16, weights = from("down") }
    end
    return block
  end

  parts.prefill = { waves = waves_of(facts.sequential and PREFILL_SEQUENTIAL or PREFILL_PARALLEL, moe) }

  function parts.prefill.values(m)
    local s, tokens = m.shape, m.prefill.tokens
    local v = M.values(m)
    v.prefill_tokens, v.spans = tokens, SPANS
    v.key_tokens = math.max(round_up(s.max_context, KEY_TILE), tokens + KEY_TILE * SPANS)
    v.pair_rows = s.experts and round_up(tokens * s.experts_per_token, 64) + 64 * s.experts or 0
    v.o_bias = number(fact("o_bias", s))
    return v
  end

  -- Rows are tokens of the chunk, or pairs of a token and an expert.  One unit each: who reads a buffer waits for all
  -- of it.  operand: rows in blocks of 64 x 64, as wide as packed weights are.
  function parts.prefill.buffers(m)
    local s, v, list = m.shape, M.prefill.values(m), {}
    local tokens, most = v.prefill_tokens, math.max(v.experts_per_token, 1)
    local function buffer(name, bytes) list[#list + 1] = { name = name, bytes = bytes, extent = 1 } end
    local function operand(name, rows, width) buffer(name, rows * round_up(width, 256) * 2) end
    buffer("x0", tokens * s.hidden * 4)
    buffer("x1", tokens * s.hidden * 4)
    buffer("places", tokens * 2 * 4)
    operand("xn", tokens, s.hidden)
    operand("xn_rows", moe and tokens or 64, s.hidden)
    buffer("q", tokens * v.q_width * 2)
    buffer("pages", 128)                                                -- stands for what qkv appends
    buffer("keys", v.key_tokens * s.kv_heads * s.head_dim * 2)
    buffer("values", v.key_tokens * s.kv_heads * s.head_dim * 2)
    operand("attn", tokens, v.q_width)
    buffer("o", tokens * s.hidden * 2)
    if moe then
      buffer("logits", tokens * router_rows(s) * 4)
      buffer("choice", tokens * most * 4)
      buffer("weight", tokens * most * 4)
      buffer("counts", m.target.sms * s.experts * 4)
      buffer("first", (s.experts + 1) * 4)
      buffer("pair", v.pair_rows * 4)
      operand("xn_pairs", v.pair_rows, s.hidden)
      operand("h", v.pair_rows, s.expert_ff)
    end
    if s.dense_ff then operand("dense_h", tokens, s.dense_ff) end
    buffer("mlp", tokens * most * s.hidden * 2)
    return list
  end

  function parts.prefill.front()
    return { { op = "prefill_embed", weights = { weight_kib = { array = "embed", layer = 0 } } } }
  end

  -- The last layer ends with its keys and values: what the last token says is for a decode step to find out.
  function parts.prefill.block(i, m)
    local s, kind = m.shape, M.layer(i, m.shape)
    local last, sliding = i == s.layers - 1, number(kind.attention == "sliding")
    local function node(op, array, fields)
      local weights = array and { weight_kib = { array = array, layer = i } }
      return { op = "prefill_" .. op, weights = weights, fields = fields }
    end
    -- o, mlp: what is added; rows: of the MLP before, one for each expert of a token.
    local function norm(array, residual, o, mlp, rows)
      return { op = "prefill_norm", residual = residual, weights = { gamma_kib = { array = array, layer = i } },
               fields = { from_o = number(o), from_mlp = number(mlp), mlp_rows = rows },
               from = { o = o and residual == 0 and i - 1 or i, mlp = mlp and i - 1 or i } }
    end
    local function rows_of(layer) return M.layer(layer, s).mlp == "dense" and 1 or s.experts_per_token end
    local qkv = node("qkv", "qkv", { rope = number(kind.rope), sliding = sliding, kv_layer = kind.kv_layer,
                                     first_row = last and s.heads * s.head_dim or 0 })
    qkv.from = { places = -1 }
    local function vector(to, field, array, present)
      if present then to.weights[field] = { array = array, layer = i } else to.fields[field] = 0 end
    end
    vector(qkv, "bias_kib", "qkv_bias", fact("qkv_bias", s))
    vector(qkv, "gamma_kib", "qk_norm", fact("qk_norm", s))
    local block = {
      norm = norm("norm", 0, i > 0 and not facts.sequential, i > 0, i > 0 and rows_of(i - 1) or 1), qkv = qkv,
    }
    if last then return block end
    local of_kind = { sliding = sliding, kv_layer = kind.kv_layer }
    block.unpack = node("unpack", nil, of_kind)
    block.attention = node("attention", nil, { sliding = sliding })
    block.o_proj = node("o_proj", "o", {})
    vector(block.o_proj, "bias_kib", "o_bias", fact("o_bias", s))
    if facts.sequential then block.mlp_norm = norm("mlp_norm", 1, true, false, 1) end
    if kind.mlp == "dense" then
      block.up, block.down = node("up", "dense_up"), node("down", "dense_down")
    else
      block.router, block.route, block.sort = node("router", "router"), node("route"), node("sort")
      block.gather = node("gather")
      block.up, block.down = node("expert_up", "up"), node("expert_down", "down")
    end
    return block
  end

  -- experts = 0: no expert dimension.  gate_up: gate rows, then up rows; vector: one row, not a matrix.
  function parts.arrays(m)
    local s = m.shape
    local dense = dense_layers(s)
    local list = {}
    local function array(name, layer0, layers, experts, rows, cols, layout)
      if layers > 0 then
        list[#list + 1] = { name = name, layer0 = layer0, layers = layers, experts = experts, rows = rows, cols = cols,
                            layout = layout }
      end
    end
    array("embed", 0, 1, 0, vocab_rows(s), s.hidden, "rows")
    if not fact("tied", s) then array("head", 0, 1, 0, vocab_rows(s), s.hidden, "rows") end
    array("norm", 0, s.layers + 1, 0, 1, s.hidden, "vector")                       -- the last one is the final norm
    if facts.sequential then array("mlp_norm", 0, s.layers, 0, 1, s.hidden, "vector") end
    array("qkv", 0, s.layers, 0, qkv_rows(s), s.hidden, facts.rope_halves and "halves" .. s.head_dim or "pairs")
    if fact("qkv_bias", s) then array("qkv_bias", 0, s.layers, 0, 1, qkv_rows(s), "vector") end
    if fact("qk_norm", s) then array("qk_norm", 0, s.layers, 0, 1, 2 * s.head_dim, "vector") end
    array("o", 0, s.layers, 0, s.hidden, s.heads * s.head_dim, "rows")
    if fact("o_bias", s) then array("o_bias", 0, s.layers, 0, 1, s.hidden, "vector") end
    array("dense_up", 0, dense, 0, 2 * (s.dense_ff or 0), s.hidden, "gate_up")
    array("dense_down", 0, dense, 0, s.hidden, s.dense_ff, "rows")
    if moe then array("router", dense, s.layers - dense, 0, router_rows(s), s.hidden, "rows") end
    array("up", dense, s.layers - dense, s.experts, 2 * (s.expert_ff or 0), s.hidden, "gate_up")
    array("down", dense, s.layers - dense, s.experts, s.hidden, s.expert_ff, "rows")
    return list
  end

  -- %d in a name: the layer, then the expert.  Layer n goes to the array's element of layer n.  dims: 1 for a vector,
  -- whose row0 counts elements: it may be a part of the array's.  twin: it may be there too, and is then the same.
  function parts.tensors(m)
    local s = m.shape
    local dense = dense_layers(s)
    local moe_layers = s.layers - dense
    local q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    local list = {}
    local function tensor(what, layer0, layers, experts, rows, cols, array, row0)
      if layers > 0 then
        list[#list + 1] = { name = name_of(what), layer0 = layer0, layers = layers, experts = experts, rows = rows,
                            cols = cols, dims = rows == 1 and 1 or 2, array = array, row0 = row0 or 0 }
      end
      return list[#list]
    end
    tensor("embed", 0, 1, 0, s.vocab, s.hidden, "embed")
    if fact("tied", s) then
      tensor("head", 0, 1, 0, s.vocab, s.hidden, "embed").twin = true
    else
      tensor("head", 0, 1, 0, s.vocab, s.hidden, "head")
    end
    tensor("final_norm", s.layers, 1, 0, 1, s.hidden, "norm")
    tensor("norm", 0, s.layers, 0, 1, s.hidden, "norm")
    if facts.sequential then tensor("mlp_norm", 0, s.layers, 0, 1, s.hidden, "mlp_norm") end
    tensor("q", 0, s.layers, 0, q, s.hidden, "qkv")
    tensor("k", 0, s.layers, 0, kv, s.hidden, "qkv", q)
    tensor("v", 0, s.layers, 0, kv, s.hidden, "qkv", q + kv)
    if fact("qkv_bias", s) then
      tensor("q_bias", 0, s.layers, 0, 1, q, "qkv_bias")
      tensor("k_bias", 0, s.layers, 0, 1, kv, "qkv_bias", q)
      tensor("v_bias", 0, s.layers, 0, 1, kv, "qkv_bias", q + kv)
    end
    if fact("qk_norm", s) then
      tensor("q_norm", 0, s.layers, 0, 1, s.head_dim, "qk_norm")
      tensor("k_norm", 0, s.layers, 0, 1, s.head_dim, "qk_norm", s.head_dim)
    end
    tensor("o", 0, s.layers, 0, s.hidden, q, "o")
    if fact("o_bias", s) then tensor("o_bias", 0, s.layers, 0, 1, s.hidden, "o_bias") end
    tensor("gate", 0, dense, 0, s.dense_ff, s.hidden, "dense_up")
    tensor("up", 0, dense, 0, s.dense_ff, s.hidden, "dense_up", s.dense_ff)
    tensor("down", 0, dense, 0, s.hidden, s.dense_ff, "dense_down")
    tensor("router", dense, moe_layers, 0, s.experts, s.hidden, "router")
    tensor("expert_gate", dense, moe_layers, s.experts, s.expert_ff, s.hidden, "up")
    tensor("expert_up", dense, moe_layers, s.experts, s.expert_ff, s.hidden, "up", s.expert_ff)
    tensor("expert_down", dense, moe_layers, s.experts, s.hidden, s.expert_ff, "down")
    return list
  end

  function parts.rope(m) return rope.frequencies(m.shape) end

  function parts.config(m)
    local list = {}
    local function add(more)
      for _, f in ipairs(more) do
        list[#list + 1] = { path = f[1], or_path = f.or_path, value = f[2], required = f.required or false }
      end
    end
    if facts.config then add(facts.config(m.shape)) end
    add(rope.config(m.shape))
    local kinds = {}
    for i = 0, m.shape.layers - 1 do kinds[i + 1] = attention(i, m.shape) .. "_attention" end
    add({ { "layer_types", kinds } })
    return list
  end

  for _, part in ipairs({ "rules", "residuals", "waves", "layer", "values", "buffers", "front", "back", "block",
                          "prefill", "arrays", "tensors", "rope", "config" }) do
    if M[part] == nil then M[part] = parts[part] end
  end
  return M
end

return decoder
