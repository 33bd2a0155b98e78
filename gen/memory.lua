-- Where everything lives: activation buffers in one arena, weight arrays in another.
--
-- Activation buffers never share memory over time, so an offset names a buffer; descriptors hold it in units of
-- 128 bytes. Behind the others lie those whose words tell that they are there (exchange), twice: a step uses the copy
-- of its parity, and offsets are of the first. Weight offsets are in KiB. An array is [layer][expert][row tile], a row
-- tile 16 rows of the padded width:
--
--   array.kib        start of the array        array.layer_kib   from one layer to the next
--   array.expert_kib one expert's matrix       array.tile_kib    one row tile (0 for a vector)
local M = {}

M.UNIT = 128                    -- bytes a buffer offset counts
M.KIB = 1024
local TILE_ROWS = 16
local GRANULE = 256             -- columns that a row tile's width is padded to

local function round_up(n, unit) return (n + unit - 1) // unit * unit end

--- Width of a packed row of `cols` columns.
function M.packed_cols(cols) return round_up(cols, GRANULE) end

local function place_array(array, kib)
  if array.layout == "vector" then
    array.tile_kib = 0
    array.expert_kib = round_up(array.cols * 2, M.KIB) // M.KIB
  else
    assert(array.rows % TILE_ROWS == 0, array.name)
    array.tile_kib = TILE_ROWS * M.packed_cols(array.cols) * 2 // M.KIB
    array.expert_kib = array.rows // TILE_ROWS * array.tile_kib
  end
  array.kib = kib
  array.layer_kib = array.expert_kib * math.max(array.experts, 1)
  return kib + array.layer_kib * array.layers
end

--- Requires: the graph. Leaves: buffer.offset128, g.arena_bytes, g.exchange_at and g.exchange_bytes (of one copy), the
--- arrays' places, g.weights_kib, and in every node's fields its weight offsets and buffer offsets.
function M.assign(g)
  local at = 0
  local function place(posted)
    for _, buffer in ipairs(g.buffers) do
      if (buffer.posted or false) == posted then
        buffer.offset128 = at // M.UNIT
        at = at + round_up(buffer.bytes, M.UNIT)
      end
    end
  end
  place(false)
  g.exchange_at = at
  place(true)
  g.exchange_bytes = at - g.exchange_at
  g.arena_bytes = at + g.exchange_bytes

  local kib = 0
  for _, array in ipairs(g.arrays) do kib = place_array(array, kib) end
  g.weights_kib = kib

  for _, node in ipairs(g.nodes) do
    for field, from in pairs(node.weights) do
      local array = assert(g.array[from.array], from.array)
      node.fields[field] = array.kib + (from.layer - array.layer0) * array.layer_kib
    end
    for formal, actual in pairs(node.bind) do node.fields[formal] = g.buffer[actual].offset128 end
  end
  return g
end

return M
