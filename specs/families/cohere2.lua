-- The dense Cohere2 family: attention and MLP side by side after one LayerNorm without bias; sliding layers with RoPE,
-- full layers without positions; scaled logits.
local decoder = library("decoder")

local M = {}

M.name = "cohere2"
M.summary = "Cohere2, dense (Command R7B)"
M.model_types = { "cohere2" }
M.config_ignored = { "layer_switch" }          -- sliding_window_pattern in other words

-- Without a full layer the period is longer than the model.
local function full_every(read)
  local kinds = read("layer_types")
  if type(kinds) ~= "table" then return read("sliding_window_pattern"), "sliding_window_pattern" end
  for i, kind in ipairs(kinds) do
    if kind == "full_attention" then return i, "by layer_types" end
  end
  return #kinds + 1, "by layer_types: no layer is full"
end

M.shape = decoder.rows({
  "layers", "hidden", "heads", decoder.KV_HEADS, decoder.HEAD_DIM, "dense_ff", "vocab",
  { "full_attention_every", "int", min = 1, max = 257, from_config = full_every, doc = "one layer in so many is full" },
  { "sliding_window", config_default = 4096 },
  { "rope_theta", config_default = 10000.0 },
  { "norm_eps", config = "layer_norm_eps", config_default = 1e-5, doc = "epsilon of LayerNorm" },
  { "logit_scale", config_default = 0.0625 }, "max_context",
})

local function is_full(i, s) return (i + 1) % s.full_attention_every == 0 end

return decoder.complete(M, {
  sequential = false, layer_norm = true, rope_halves = false, tied = true,
  attention = function(i, s) return is_full(i, s) and "full" or "sliding" end,
  rotates = function(i, s) return not is_full(i, s) end,
  config = function(s)
    return { { "hidden_act", "silu" }, { "attention_bias", false }, { "use_qk_norm", false },
             { "use_parallel_block", true }, { "tie_word_embeddings", true },
             { "sliding_window_pattern", s.full_attention_every, or_path = "_sliding_window_pattern" } }
  end,
})
