-- The Llama family: attention and MLP in turn, RMSNorm before each, rotary positions in every layer, grouped queries.
local decoder = library("decoder")

local M = {}

M.name = "llama"
M.summary = "Llama 3.x, SmolLM2 and other models of their architecture"
M.model_types = { "llama" }

M.shape = decoder.rows({
  "layers", "hidden", "heads", decoder.KV_HEADS, decoder.HEAD_DIM, "dense_ff", "vocab",
  { "tied", config_default = false },
  { "attention_bias", doc = "q, k, v and o have biases" },
  { "rope_theta", config_default = 10000.0 }, "rope_scaling",
  { "norm_eps", config_default = 1e-6 }, "max_context",
})

return decoder.complete(M, {
  sequential = true, rope_halves = true,
  tied = function(s) return s.tied end,
  qkv_bias = function(s) return s.attention_bias end,
  o_bias = function(s) return s.attention_bias end,
  config = function()
    return { { "hidden_act", "silu" }, { "mlp_bias", false }, { "pretraining_tp", 1 }, { "rope_interleaved", false } }
  end,
})
