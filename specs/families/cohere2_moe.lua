-- The Cohere2 MoE family: parallel block, one RMSNorm per layer, sliding layers with RoPE, full layers without, experts
-- chosen by sigmoid scores, embedding tied to the LM head.
local decoder = library("decoder")

local M = {}

M.name = "cohere2_moe"
M.summary = "Cohere2 mixture of experts, parallel block (North Mini Code)"
M.model_types = { "cohere2_moe" }

-- Inert beside rms_norm_eps, without shared experts, and beside layer_types.
M.config_ignored = { "layer_norm_eps", "shared_expert_combination_strategy", "sliding_window_pattern" }

-- The dense prefix is full anyway; without a full layer after it the period is longer than the rest.
local function full_every(read, s)
  local kinds = read("layer_types")
  if type(kinds) ~= "table" then return read("sliding_window_pattern"), "sliding_window_pattern" end
  for i = s.dense_layers + 1, #kinds do
    if kinds[i] == "full_attention" then return i - s.dense_layers, "by layer_types" end
  end
  return math.max(1, #kinds - s.dense_layers + 1), "by layer_types: no layer is full"
end

-- The class defaults of this model type are other than what its checkpoints use, so none is taken.  The presence of
-- rms_norm_eps selects RMSNorm.
M.shape = decoder.rows({
  "layers", "hidden", "heads", "kv_heads", { "head_dim", default = 128 },
  { "dense_layers", "int", min = 0, max = 256, default = 1, config = "first_k_dense_replace",
    doc = "leading layers with a dense MLP" },
  { "dense_ff", config = "prefix_dense_intermediate_size", doc = "width of the dense MLP" },
  { "experts", doc = "routed experts of a MoE layer" }, "experts_per_token",
  { "expert_ff", config = "intermediate_size" }, "vocab",
  { "full_attention_every", "int", min = 1, max = 256, default = 4, from_config = full_every,
    doc = "one layer in so many is full" },
  { "sliding_window", default = 4096 }, "rope_theta", { "norm_eps", default = 1e-6, doc = "epsilon of RMSNorm" },
  { "logit_scale", default = 1.0 }, "max_context",
})

-- { key that is marked, test, expectation }; the message adds the values of `uses`.
M.rules = {
  { "dense_layers", function(s) return s.dense_layers < s.layers end, "less than layers", uses = { "layers" } },
  decoder.RULES.experts_per_token,
}

-- The dense prefix is full; after it the last of every full_attention_every layers is.  Dense layers always have RoPE,
-- other full layers never.
local function is_full(i, s)
  return i < s.dense_layers or (i - s.dense_layers + 1) % s.full_attention_every == 0
end

local function mlp_kinds(s)
  local kinds = {}
  for i = 1, s.layers do kinds[i] = i <= s.dense_layers and "dense" or "sparse" end
  return kinds
end

return decoder.complete(M, {
  sequential = false, layer_norm = false, rope_halves = false, tied = true, route = "sigmoid",
  dense_layers = function(s) return s.dense_layers end,
  attention = function(i, s) return is_full(i, s) and "full" or "sliding" end,
  rotates = function(i, s) return not is_full(i, s) or i < s.dense_layers end,
  config = function(s)
    return {
      { "norm_topk_prob", false, required = true }, { "expert_selection_fn", "sigmoid", required = true },
      { "num_shared_experts", 0 }, { "attention_bias", false }, { "use_qk_norm", false },
      { "use_parallel_block", true }, { "tie_word_embeddings", true }, { "hidden_act", "silu" },
      { "mlp_layer_types", mlp_kinds(s) },
    }
  end,
})
