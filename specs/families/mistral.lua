-- The Mistral family: Llama's layers. Of those with a window only what fits into it.
local decoder = library("decoder")

local M = {}

M.name = "mistral"
M.summary = "Mistral 7B, Nemo, Small, without a window"
M.model_types = { "mistral" }
M.config_said = { sliding_window = 4096 }

M.shape = decoder.rows({
  "layers", "hidden", "heads", "kv_heads", decoder.HEAD_DIM, "dense_ff", "vocab", { "tied", config_default = false },
  { "rope_theta", config_default = 10000.0 }, "rope_scaling",
  { "norm_eps", config_default = 1e-6 }, "max_context",
})

return decoder.complete(M, {
  sequential = true, rope_halves = true,
  tied = function(s) return s.tied end,
  config = function() return { { "hidden_act", "silu" } } end,
})
