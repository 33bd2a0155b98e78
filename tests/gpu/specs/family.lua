-- family.lua FOLDER: writes the family cohere2_normed there, which is cohere2_moe with what its attention lacks: a bias
-- on q, k and v, a norm of every q and k head, and RoPE that turns halves.  No such model exists; tests need the ops.
local file = assert(io.open("specs/families/cohere2_moe.lua"))
local text = file:read("a")
file:close()

local function change(old, new)
  local from, to = text:find(old, 1, true)
  assert(from and not text:find(old, to, true), "not once in cohere2_moe: " .. old)
  text = text:sub(1, from - 1) .. new .. text:sub(to + 1)
end

change('M.name = "cohere2_moe"', 'M.name = "cohere2_normed"')
change("rope_halves = 0, qk_norm = 0, qkv_bias = 0", "rope_halves = 1, qk_norm = 1, qkv_bias = 1")
change('{ name = "squares", bytes = 4, extent = 1 }',
  '{ name = "squares", bytes = cols * qkv_rows(s) // 16 * 4, extent = qkv_rows(s) // 16 }')
change('weights = from("qkv")', [[
weights = { weight_kib = { array = "qkv", layer = i }, bias_kib = { array = "qkv_bias", layer = i },
                        gamma_kib = { array = "qk_norm", layer = i } }]])
change(", bias_kib = 0,\n                       gamma_kib = 0 }", " }")
change('array("qkv", 0, s.layers, 0, qkv_rows(s), s.hidden, "pairs")', [[
array("qkv", 0, s.layers, 0, qkv_rows(s), s.hidden, "halves" .. s.head_dim)
  array("qkv_bias", 0, s.layers, 0, 1, qkv_rows(s), "vector")
  array("qk_norm", 0, s.layers, 0, 1, 2 * s.head_dim, "vector")]])
change('tensor(layer .. "self_attn.o_proj.weight"', [[
tensor(layer .. "self_attn.bias", 0, s.layers, 0, 1, qkv_rows(s), "qkv_bias")
  tensor(layer .. "self_attn.norm", 0, s.layers, 0, 1, 2 * s.head_dim, "qk_norm")
  tensor(layer .. "self_attn.o_proj.weight"]])

file = assert(io.open(arg[1] .. "/cohere2_normed.lua", "w"))
file:write(text)
file:close()
