-- The Qwen3 mixture of experts: Qwen3's attention; experts in every layer, chosen by a softmax over all of them, whose
-- weights are made to add up to 1 or left as they are.
local decoder = library("decoder")

local M = {}

M.name = "qwen3_moe"
M.summary = "Qwen3 mixture of experts"
M.model_types = { "qwen3_moe" }
M.config_ignored = { "intermediate_size" }     -- of dense layers, which there are none of

M.shape = decoder.rows({
  "layers", "hidden", "heads", "kv_heads", decoder.HEAD_DIM, { "experts", or_config = "num_local_experts" },
  "experts_per_token", "expert_ff",
  { "norm_topk_prob", "bool", config = "norm_topk_prob", config_default = false,
    doc = "the weights of a token's experts add up to 1" },
  "vocab", { "tied", config_default = false },
  { "rope_theta", config_default = 10000.0 }, "rope_scaling",
  { "norm_eps", config_default = 1e-6 }, "max_context",
})

M.rules = { decoder.RULES.experts_per_token }

return decoder.complete(M, {
  sequential = true, rope_halves = true, qk_norm = true,
  tied = function(s) return s.tied end,
  route = function(s) return s.norm_topk_prob and "chosen" or "all" end,
  config = function()
    return { { "hidden_act", "silu" }, { "attention_bias", false }, { "use_sliding_window", false },
             { "use_qk_norm", true }, { "decoder_sparse_step", 1 }, { "mlp_only_layers", {} } }
  end,
})
