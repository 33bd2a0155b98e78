-- The op graph: a family's block recipe unrolled over the layers, in wave order.
--
-- A node is one op instance. The order of g.nodes is the meaning of the step: running the nodes one after the other is
-- correct by construction, and every later stage only has to keep that meaning. (op, layer) names a node; layer is -1
-- before the first and after the last layer, -2 for the second node of an op there, and so on.
--
--   g.nodes    { id, op = name, spec = the op's registry entry, layer, name, tiles | units, fields, bind, weights }
--              bind[formal buffer] = actual buffer's name; fields: constant task fields
--   g.buffers  { name, bytes, extent }, ordered; g.buffer[name] is the same; extent is the size of the index space
--   g.used     [op] = true where a node has it
--   g.params   [op] = { name = value }
--   g.arrays   packed weight arrays, g.array[name] likewise; g.tensors: where each checkpoint tensor goes
local M = {}

local function fields_copy(fields)
  local copy = {}
  for name, value in pairs(fields or {}) do copy[name] = value end
  return copy
end

-- The actual buffer of a formal one, and the family's buffer that it is like. The residual goes from x of the layer to
-- y = x of the next (slot: the number of layers before the node); all others keep their name, and without reuse each
-- layer has its own.
local function actual_name(formal, layer, slot, reuse)
  if formal == "x" or formal == "y" then
    local n = slot + (formal == "y" and 1 or 0)
    return reuse and "x" .. n % 2 or "x" .. n, "x" .. n % 2
  end
  if reuse or layer < 0 then return formal, formal end
  return ("%s_%d"):format(formal, layer), formal
end

-- An op's parameters; nil where the family lacks a value and nobody uses the op.
local function op_params(op, values, used, diag)
  local params, pos = {}, { file = op.file, line = 1, col = 1 }
  for _, param in ipairs(op.params) do
    local value = values[param.name]
    if value == nil then
      if used then diag:error(pos, "parameter '%s': the family has no such value", param.name) end
      return nil
    end
    if param.type == "i32" and math.type(value) ~= "integer" then
      diag:error(pos, "parameter '%s': %s is not an integer", param.name, tostring(value))
    end
    params[param.name] = value
  end
  return params
end

--- Requires: a checked model and the registry of ops. Leaves: the graph; mistakes in diag.
function M.build(model, registry, diag)
  local family, shape, schedule = model.family_module, model.shape, model.schedule
  local reuse = schedule.reuse_buffers
  local layers = shape.layers
  local g = {
    model = model, registry = registry, nodes = {}, buffers = {}, buffer = {}, params = {},
    sms = model.target.sms, columns = schedule.columns,
  }
  local bases, named = {}, {}
  for _, buffer in ipairs(family.buffers(model)) do
    bases[#bases + 1] = buffer.name
    bases[buffer.name] = buffer
  end

  local outside = {}            -- [op] = its nodes before and after the layers so far
  local function add(node, layer, slot)
    local op = registry.by_name[node.op]
    local name
    if layer < 0 then
      layer = -1 - (outside[node.op] or 0)
      outside[node.op] = -layer
      name = node.op .. (layer < -1 and ("%d"):format(-layer) or "")
    else
      name = ("layer%d.%s"):format(layer, node.op)
    end
    local pos = { file = ("specs/families/%s.lua"):format(family.name), line = 1, col = 1 }
    if not op then
      diag:error(pos, "node %s: there is no op '%s'", name, node.op)
      return
    end
    if named[name] then
      diag:error(pos, "two nodes %s", name)
      return
    end
    local bind = {}
    for _, formal in ipairs(op.buffers) do
      local actual, base = actual_name(formal, layer, slot, reuse)
      if not bases[base] then
        diag:error({ file = op.file, line = 1, col = 1 }, "buffer '%s': the family has no such buffer", formal)
      elseif not g.buffer[actual] then
        g.buffer[actual] = { name = actual, base = base, bytes = bases[base].bytes, extent = bases[base].extent }
        g.buffers[#g.buffers + 1] = g.buffer[actual]
      end
      bind[formal] = actual
    end
    local n = {
      id = #g.nodes + 1, op = node.op, spec = op, layer = layer, name = name, tiles = node.tiles, units = node.units,
      fields = fields_copy(node.fields), bind = bind, weights = node.weights or {},
    }
    g.nodes[n.id], named[name] = n, n
  end

  for _, node in ipairs(family.front(model)) do add(node, -1, 0) end
  for layer = 0, layers - 1 do
    local block = family.block(layer, model)
    for _, wave in ipairs(schedule.order) do
      local node = block[wave]
      if node then add(node, layer, layer) end
    end
  end
  for _, node in ipairs(family.back(model)) do add(node, -1, layers) end

  -- In the order of the family's list, then of first use.
  local rank = {}
  for i, name in ipairs(bases) do rank[name] = i end
  for i, buffer in ipairs(g.buffers) do buffer.order = i end
  table.sort(g.buffers, function(a, b)
    if rank[a.base] ~= rank[b.base] and reuse then return rank[a.base] < rank[b.base] end
    return a.order < b.order
  end)

  local used = {}
  for _, node in ipairs(g.nodes) do used[node.op] = true end
  local values = family.values(model)
  for _, op in ipairs(registry.list) do g.params[op.name] = op_params(op, values, used[op.name], diag) end
  g.used = used

  g.arrays, g.array, g.tensors = family.arrays(model), {}, family.tensors(model)
  for _, array in ipairs(g.arrays) do g.array[array.name] = array end
  return g
end

return M
