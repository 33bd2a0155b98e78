-- Lists of a known length. One that grows word by word is copied again and again, and there are tens of thousands.
local zeros = {}

--- A list of n zeros with room for just them.
return function(n)
  for i = #zeros + 1, n do zeros[i] = 0 end
  return { table.unpack(zeros, 1, n) }
end
