-- A fixed amount of Lua work of the generator's kind: tables, integer arithmetic, strings. See timing_generate.lua.
local sum, rows = 0, {}
for i = 1, 300000 do
  local row = { id = i, sm = i % 132, fields = { i & 31, i >> 3 } }
  rows[#rows + 1] = row
  sum = (sum * 31 + row.sm + row.fields[1]) & 0xffffffff
end
local parts = {}
for i = 1, #rows, 3 do parts[#parts + 1] = ("%d:%d"):format(rows[i].id, rows[i].sm) end
for _ = 1, 6 do
  for i = 1, #rows do sum = (sum + rows[i].fields[2] * 7) & 0xffffffff end
end
assert(#table.concat(parts, ",") > 0 and sum >= 0)
