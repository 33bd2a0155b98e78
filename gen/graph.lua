-- The op graph: a family's block recipe unrolled over the layers, in wave order.
--
-- A node is one op instance. The order of g.nodes is the meaning of the step: running the nodes one after the other is
-- correct by construction, and every later stage only has to keep that meaning. A task names its node by number, which
-- is id - 1.
--
-- Where there are more tiles than SMs to own them, the wave, with all waves around it that are dealt to owners, is done
-- in passes: the first `sms` tiles of all these waves, then the next, so that an SM still has one tile in hand. Each
-- pass of a wave is a node; what the passes of one wave write is waited for by one counter.
--
--   g.nodes    { id, op = name, spec = the op's registry entry, layer, name, tiles | units, fields, bind, weights,
--              first_tile, first_pass, last_pass }
--              layer: -1 before the first and after the last layer; bind[formal buffer] = actual buffer's name;
--              fields: constant task fields; first_tile: where the pass begins; first_pass, last_pass: the first and
--              the last pass of the wave, the node itself where there is one
--   g.buffers  { name, bytes, extent }, ordered; g.buffer[name] is the same; extent is the size of the index space
--   g.used     [op] = true where a node has it
--   g.tickets  tickets of a step: a layer's nodes that claim have one each; g.claim_units: most units of such a node
--   g.params   [op] = { name = value }
--   g.points   [point] = { { op = registry entry, params } ... }: what is inserted there, in order
--   g.values   what a spec's `insert:` may name, see insert.lua
--   g.kept     whether SMs keep the residual in registers: there is no buffer for it then
--   g.arrays   packed weight arrays, g.array[name] likewise; g.tensors: where each checkpoint tensor goes
local insert = require("insert")
local ops = require("ops")

local M = {}

local function fields_copy(fields)
  local copy = {}
  for name, value in pairs(fields or {}) do copy[name] = value end
  return copy
end

-- The formal buffers of the residual, as its owner has it and as all read it: { name, additions to what goes in }.
local RESIDUAL = { x = { "x", 0 }, y = { "x", 1 }, xb = { "xb", 0 }, yb = { "xb", 1 } }

-- The actual buffer of a formal one, and the family's buffer that it is like. The residual goes from x to y, the x of
-- the next addition (slot: the number of additions before the node); all others keep their name, and without reuse each
-- layer has its own.
local function actual_name(formal, layer, slot, reuse)
  local residual = RESIDUAL[formal]
  if residual then
    local name, n = residual[1], slot + residual[2]
    return name .. (reuse and n % 2 or n), name .. n % 2
  end
  if reuse or layer < 0 then return formal, formal end
  return ("%s_%d"):format(formal, layer), formal
end

-- Numbers that ops may name as parameters beside the family's: claim_up = 1 for the second of ops.CLAIMS, and so on;
-- attention_ticket, the first ticket of attention: full layers, then sliding ones.
local function with_claims(values, claim, layers)
  values.attention_ticket = layers
  values.hands, values.handed = 0, 0                    -- see handing.lua
  for key, how in pairs(claim) do
    for i, known in ipairs(ops.CLAIMS) do
      if how == known then values["claim_" .. key] = i - 1 end
    end
  end
  return values
end

-- The most units that the tasks of one node claim.
local function claim_units(g)
  local most = 1
  for _, node in ipairs(g.nodes) do
    for _, region in ipairs(node.spec.writes) do
      local buffer = region.claim and g.buffer[node.bind[region.name]]
      if buffer then most = math.max(most, buffer.extent) end
    end
  end
  return most
end

-- buffer.posted: all that write it post it, and all that read it await it. Or none does: ops have no third way.
local function mark_posted(g, diag)
  local other = {}                                      -- [buffer] = an op that does not
  for _, node in ipairs(g.nodes) do
    for _, way in ipairs({ "reads", "writes" }) do
      for _, region in ipairs(node.spec[way]) do
        local buffer = region.global and g.buffer[node.bind[region.name]]
        if buffer and region.posted then
          buffer.posted = buffer.posted or node.spec
        elseif buffer then
          other[buffer] = other[buffer] or node.spec
        end
      end
    end
  end
  for _, buffer in ipairs(g.buffers) do
    if buffer.posted and other[buffer] then
      diag:error({ file = other[buffer].file, line = 1, col = 1 }, "schedule.exchange validated: %s uses buffer %s " ..
        "as %s does not, which posts or awaits its words: expected `posts = true` of who writes it, `awaits = true` " ..
        "of who reads it", other[buffer].name, buffer.name, buffer.posted.name)
    end
    buffer.posted = buffer.posted ~= nil
  end
end

-- An op's parameters; nil where the family lacks a value and nobody uses the op.
local function op_params(op, values, inserted, used, diag)
  local params, pos = {}, { file = op.file, line = 1, col = 1 }
  for _, param in ipairs(op.params) do
    local value = inserted and inserted[param.name]
    if value == nil then value = values[param.name] end
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

-- Nodes as they are to be added, with passes. waves: { node, wave = name } in order.
local function with_passes(waves, registry, sms)
  local list = {}
  local function owned(wave)
    local op = wave and registry.by_name[wave.node.op]
    return op and op.tile == "owner"
  end
  local i = 1
  while i <= #waves do
    local to, passes = i, 1
    while owned(waves[i]) and owned(waves[to + 1]) do to = to + 1 end
    for k = i, owned(waves[i]) and to or i - 1 do
      passes = math.max(passes, (waves[k].node.tiles + sms - 1) // sms)
    end
    for pass = 1, passes do
      for k = i, to do
        local wave = waves[k]
        local tiles, first = wave.node.tiles, (pass - 1) * sms
        if pass == 1 or first < tiles then
          local last = not owned(wave) or first + sms >= tiles
          list[#list + 1] = {
            node = wave.node, wave = wave.wave, pass = pass, last = last, first_tile = first,
            tiles = owned(wave) and math.min(tiles - first, sms) or tiles,
          }
        end
      end
    end
    i = to + 1
  end
  return list
end

-- Whether the spec or the family inserts anything at a value.
local function inserts_at(model, value)
  local family = model.family_module
  for _, list in ipairs({ model.insert or {}, family.insert and family.insert(model) or {} }) do
    for _, ins in ipairs(list) do
      if ins.value == value then return true end
    end
  end
  return false
end

-- Whether an SM keeps its rows of the residual in registers, from the embedding to the last addition: where it has one
-- tile of them, and nothing is inserted at them.
local function keeps_residual(model)
  local rows = model.family_module.values(model).hidden
  return rows ~= nil and rows <= model.target.sms * 16 and not inserts_at(model, "x")
end

--- Requires: a checked model and the registry of ops. Leaves: the graph; mistakes in diag.
function M.build(model, registry, diag)
  local family, shape, schedule = model.family_module, model.shape, model.schedule
  local validated = schedule.exchange == "validated"
  local reuse = schedule.reuse_buffers and not validated
  local kept = keeps_residual(model)
  -- An SM can add up what its rows of the residual are worth to the router: nobody else has them, or needs the logits.
  model.sums_logits = kept and not inserts_at(model, "logits")
  ops.settle(registry, schedule.claim, schedule.exchange, family.values(model).sequential == 1, kept)
  local layers = shape.layers
  local g = {
    model = model, registry = registry, nodes = {}, buffers = {}, buffer = {}, params = {},
    sms = model.target.sms, columns = schedule.columns, kept = kept,
  }
  local bases, named = {}, {}
  for _, buffer in ipairs(family.buffers(model)) do
    bases[#bases + 1] = buffer.name
    bases[buffer.name] = buffer
  end
  local values = with_claims(family.values(model), schedule.claim, layers)
  local inserts = insert.new(model, registry, bases, values, diag)

  -- A node is called by its op; another one of that op by its wave, or with a number where it has none.
  local function name_of(prefix, node, wave)
    local name, n = prefix .. node.op, 1
    while named[name] do
      n = n + 1
      name = wave and n == 2 and prefix .. wave or ("%s%s%d"):format(prefix, node.op, n)
    end
    return name
  end

  -- With more columns than an MMA takes, the normalised x is in global memory.
  local wide = ops.is_wide(schedule.columns)
  if wide then
    bases[#bases + 1] = "xn"
    bases.xn = { name = "xn", bytes = schedule.columns * family.values(model).hidden * 2, extent = schedule.columns }
  end

  local function add_pass(part, layer, slot, earlier)
    local node = part.node
    local op = registry.by_name[node.op]
    if wide and op and op.wide then op = registry.by_name[op.wide] end
    local prefix = layer < 0 and "" or ("layer%d."):format(layer)
    local name = earlier and ("%s.%d"):format(earlier[1].name, part.pass) or name_of(prefix, node, part.wave)
    local pos = { file = ("specs/families/%s.lua"):format(family.name), line = 1, col = 1 }
    if not op then
      diag:error(pos, "node %s: there is no op '%s'", name, node.op)
      return
    end
    local bind = {}
    for _, formal in ipairs(op.buffers) do
      local alias = node.alias and node.alias[formal]
      local of_layer = node.from and node.from[formal] or layer
      local actual, base = actual_name(alias and alias.value or formal, of_layer, slot, reuse)
      actual = actual .. (alias and alias.suffix or "")
      if not bases[base] then
        diag:error({ file = op.file, line = 1, col = 1 }, "buffer '%s': the family has no such buffer", formal)
      elseif not g.buffer[actual] then
        g.buffer[actual] = { name = actual, base = base, bytes = bases[base].bytes, extent = bases[base].extent }
        g.buffers[#g.buffers + 1] = g.buffer[actual]
      end
      bind[formal] = actual
    end
    local n = {
      id = #g.nodes + 1, op = op.name, spec = op, layer = layer, name = name, tiles = part.tiles, units = node.units,
      fields = fields_copy(node.fields), bind = bind, weights = node.weights or {}, first_tile = part.first_tile,
    }
    g.nodes[n.id], named[name] = n, n
    return n
  end

  -- Waves one after the other. before: the additions to the residual before them.
  local function add(waves, layer, before)
    local passes = {}           -- [node of the family] = its nodes here
    for _, part in ipairs(with_passes(inserts:section(waves, layer), registry, g.sms)) do
      local earlier = passes[part.node]
      local n = add_pass(part, layer, before + (part.node.residual or 0), earlier)
      if n then
        passes[part.node] = earlier or {}
        table.insert(passes[part.node], n)
        n.first_pass = passes[part.node][1]
        for _, pass in ipairs(part.last and passes[part.node] or {}) do pass.last_pass = n end
      end
    end
  end
  local function unnamed(nodes)
    local waves = {}
    for i, node in ipairs(nodes) do waves[i] = { node = node } end
    return waves
  end

  local residuals = family.residuals or 1
  add(unnamed(family.front(model)), -1, 0)
  for layer = 0, layers - 1 do
    local block, waves = family.block(layer, model), {}
    for _, wave in ipairs(schedule.order) do
      if block[wave] then waves[#waves + 1] = { node = block[wave], wave = wave } end
    end
    add(waves, layer, layer * residuals)
  end
  add(unnamed(family.back(model)), -1, layers * residuals)
  inserts:finish()

  -- In the order of the family's list, then of first use.
  local rank = {}
  for i, name in ipairs(bases) do rank[name] = i end
  for i, buffer in ipairs(g.buffers) do buffer.order = i end
  table.sort(g.buffers, function(a, b)
    if rank[a.base] ~= rank[b.base] and reuse then return rank[a.base] < rank[b.base] end
    return a.order < b.order
  end)

  if validated then mark_posted(g, diag) end

  local used = {}
  for _, node in ipairs(g.nodes) do used[node.op] = true end
  for _, op in ipairs(registry.list) do
    g.params[op.name] = op_params(op, values, inserts.params[op.name], used[op.name], diag)
  end
  g.used, g.points, g.values, g.claim_units = used, inserts.points, inserts.all, claim_units(g)
  g.tickets = schedule.claim.attention ~= "static" and 2 * layers or layers
  if model.launch == "prefill" then g.tickets = #g.nodes end            -- a node's is its number

  g.arrays, g.array, g.tensors = family.arrays(model), {}, family.tensors(model)
  for _, array in ipairs(g.arrays) do g.array[array.name] = array end
  return g
end

return M
