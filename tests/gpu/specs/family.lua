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
change("rope_halves = false", "rope_halves = true, qk_norm = true, qkv_bias = true")

file = assert(io.open(arg[1] .. "/cohere2_normed.lua", "w"))
file:write(text)
file:close()
