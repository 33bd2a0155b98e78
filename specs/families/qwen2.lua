-- The Qwen2 family: Llama's layers with biases of q, k and v.
local decoder = library("decoder")

local M = {}

M.name = "qwen2"
M.summary = "Qwen2, Qwen2.5"
M.model_types = { "qwen2" }

M.shape = decoder.rows({
  "layers", "hidden", "heads", "kv_heads", decoder.HEAD_DIM, "dense_ff", "vocab", { "tied", config_default = false },
  { "rope_theta", config_default = 10000.0 }, "rope_scaling",
  { "norm_eps", config_default = 1e-6 }, "max_context",
})

return decoder.complete(M, {
  sequential = true, rope_halves = true, qkv_bias = true,
  tied = function(s) return s.tied end,
  config = function() return { { "hidden_act", "silu" }, { "use_sliding_window", false } } end,
})
