-- The dense Qwen3 family: Llama's layers with an RMSNorm of every query and key head before RoPE.
local decoder = library("decoder")

local M = {}

M.name = "qwen3"
M.summary = "Qwen3, dense"
M.model_types = { "qwen3" }

M.shape = decoder.rows({
  "layers", "hidden", "heads", "kv_heads", { "head_dim", config_default = 128 }, "dense_ff", "vocab",
  { "tied", config_default = false },
  { "rope_theta", config_default = 10000.0 }, "rope_scaling",
  { "norm_eps", config_default = 1e-6 }, "max_context",
})

return decoder.complete(M, {
  sequential = true, rope_halves = true, qk_norm = true,
  tied = function(s) return s.tied end,
  config = function()
    return { { "hidden_act", "silu" }, { "attention_bias", false }, { "use_sliding_window", false },
             { "use_qk_norm", true } }
  end,
})
