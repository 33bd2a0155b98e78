-- The Mixtral family: Llama's attention; a few experts in every layer, weighted by a softmax of the chosen scores.
local decoder = library("decoder")

local M = {}

M.name = "mixtral"
M.summary = "Mixtral mixture of experts"
M.model_types = { "mixtral" }

M.shape = decoder.rows({
  "layers", "hidden", "heads", decoder.KV_HEADS, decoder.HEAD_DIM,
  { "experts", config = "num_local_experts", or_config = "num_experts" }, "experts_per_token",
  { "expert_ff", config = "intermediate_size" },
  "vocab", { "tied", config_default = false },
  { "rope_theta", config_default = 1000000.0 }, "rope_scaling",
  { "norm_eps", config_default = 1e-5 }, "max_context",
})

M.rules = { decoder.RULES.experts_per_token }

local EXPERT = "model.layers.%d.block_sparse_moe.experts.%d."

return decoder.complete(M, {
  sequential = true, rope_halves = true, route = "chosen",
  tied = function(s) return s.tied end,
  names = {
    router = "model.layers.%d.block_sparse_moe.gate.weight",
    expert_gate = EXPERT .. "w1.weight", expert_up = EXPERT .. "w3.weight", expert_down = EXPERT .. "w2.weight",
  },
  config = function() return { { "hidden_act", "silu" } } end,
})
