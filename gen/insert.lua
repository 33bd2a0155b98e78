-- Ops that a spec inserts behind named values: `insert:` of the YAML file, and a family's insert(m).
--
-- A value is either a buffer, by the name that ops call it by, or a point: a place in an op's own code where a number
-- is in registers on its way out (`points` of the op).
--
-- At a buffer the op becomes a node of its own, behind the value's last writer in the layer, or, where the layer finds
-- the value written, before its first reader. It reads the value as `in` and writes a new buffer `out` of the same
-- form, which all later readers of the layer then read; without `out` it changes `in` itself. At a point its apply() is
-- called by the op that has the point. Either way insertions at one value take effect in the order in which they are
-- written. Here only nodes are added and bound: schedule, sync and check treat them as any others.
--
-- The residual is there twice, for its owner and, in bf16, for all who read it. It is one value, called x: behind the
-- first op inserted at it another one makes the bf16 copy anew, and all readers of either read what is new.
local diags = require("diag")
local ops = require("ops")
local writer = require("emit.writer")

local M = {}

local TILE = 16                 -- elements of a column's row that a tile has
-- What a way of dealing tiles fills in, and what an insertion knows of its value.
local DEALT = { tile = true, tiles = true, first = true, step = true, ["end"] = true, column = true, rank = true }
local OF_VALUE = { "width", "extent", "tile_units", "is_bf16" }

-- [value] = its copy's formal name, the op that makes that, and the type of the value itself.
local COPIED = { x = { name = "xb", by = "round_x", type = "f32" } }
local VALUE_OF = { xb = "x" }
-- Formals that are not values: what an addition leaves is the next one's x.
local HIDDEN = { y = true, xb = true, yb = true, [ops.IN] = true, [ops.OUT] = true }

local Insert = {}
Insert.__index = Insert

local function region_named(list, name)
  for _, r in ipairs(list) do
    if r.global and r.name == name then return r end
  end
end

local function has(list, name)
  for _, entry in ipairs(list) do
    if entry.name == name then return true end
  end
  return false
end

-- ---------------------------------------------------------------- one insertion, before it meets a layer

-- A number as a parameter or field of its type; nil, after a message, where it is none.
function Insert:number(ins, field, value)
  if field.type == "f32" then return value + 0.0 end
  if math.type(value) == "integer" then return value end
  self.diag:error(ins.places.with[field.name] or ins.at.op, "with: %s: expected an integer, got %s", field.name,
    tostring(value))
end

-- Parameters and constant fields: what `with` gives, then what the family does.
function Insert:arguments(ins, op, point)
  local names = {}
  for _, p in ipairs(op.params) do names[#names + 1] = p.name end
  for _, f in ipairs(point and {} or op.task) do
    if not DEALT[f.name] and not self.of_value[f.name] then names[#names + 1] = f.name end
  end
  for _, name in ipairs(writer.sorted(ins.with)) do
    local known = false
    for _, n in ipairs(names) do known = known or n == name end
    if not known then
      self.diag:error(ins.places.with[name], "with: op '%s' has no parameter '%s'%s", op.name, name,
        #names > 0 and diags.hint(name, names) or "")
    end
  end
  local params, fields = {}, {}
  for _, p in ipairs(op.params) do
    local value = ins.with[p.name]
    if value == nil then value = self.values[p.name] end
    if value == nil then
      self.diag:error(ins.at.with,
        "op '%s' needs the parameter '%s', which the family does not give: with: { %s: NUMBER }", op.name, p.name,
        p.name)
    else
      params[p.name] = self:number(ins, p, value)
    end
  end
  for _, f in ipairs(point and {} or op.task) do
    if not DEALT[f.name] and not self.of_value[f.name] then
      local value = ins.with[f.name]
      if value == nil then
        self.diag:error(ins.at.with, "op '%s' needs the field '%s': with: { %s: NUMBER }", op.name,
          f.name, f.name)
      else
        fields[f.name] = self:number(ins, f, value)
      end
    end
  end
  ins.params, ins.fields = params, fields
end

-- A parameter is fixed in the op's code, so all nodes of the op have the same.
function Insert:share_params(ins)
  local known = self.params[ins.op]
  if not known then
    self.params[ins.op] = ins.params
    return
  end
  for _, p in ipairs(ins.spec.params) do
    if known[p.name] ~= ins.params[p.name] then
      self.diag:error(ins.places.with[p.name] or ins.at.op,
        "with: %s is %s here and %s before: a parameter is the same in all nodes of op '%s'; a task field can differ",
        p.name, tostring(ins.params[p.name]), tostring(known[p.name]), ins.op)
    end
  end
end

function Insert:prepare(ins)
  local op = self.registry.by_name[ins.op]
  if not op then
    local names = {}
    for _, other in ipairs(self.registry.list) do
      if other.inline or region_named(other.reads, ops.IN) then names[#names + 1] = other.name end
    end
    self.diag:error(ins.at.op, "insert: there is no op '%s'%s", ins.op,
      #names > 0 and diags.hint(ins.op, names) or ": templates/ops has none that can be inserted")
    return
  end
  ins.spec = op
  local before, host = self.diag:count(), self.registry.point[ins.value]
  if host and not op.inline then
    self.diag:error(ins.at.op,
      "insert: '%s' is in registers of %s: only an op with //@device inline can be inserted there", ins.value,
      host.name)
  elseif not host and not region_named(op.reads, ops.IN) then
    self.diag:error(ins.at.op, "insert: op '%s' reads no buffer '%s', so it cannot be inserted", ins.op, ops.IN)
  elseif not host and not region_named(op.writes, ops.OUT) and not region_named(op.writes, ops.IN) then
    self.diag:error(ins.at.op, "insert: op '%s' writes neither '%s' nor '%s', so it changes nothing", ins.op, ops.OUT,
      ops.IN)
  else
    self:arguments(ins, op, host ~= nil)
    if not host then self:share_params(ins) end
  end
  ins.host = host
  ins.good = self.diag:count() == before
  if type(ins.layers) == "table" then
    ins.wanted = {}
    for i, layer in ipairs(ins.layers) do
      ins.wanted[layer] = ins.places.layers[i]
      if layer >= self.model.shape.layers then
        self.diag:error(ins.places.layers[i], "insert: layers: there is no layer %d: the model has 0 to %d", layer,
          self.model.shape.layers - 1)
        ins.good = false
      end
    end
  end
end

-- ---------------------------------------------------------------- a layer

local function selects(ins, layer)
  if ins.layers == nil then return true end
  if ins.layers == "all" then return layer >= 0 end
  if ins.layers == "outside" then return layer < 0 end
  return ins.wanted[layer] ~= nil
end

-- Where the value is written and read among the waves: the index behind its last writer (or before its first reader),
-- the readers behind that, its type; copied: the wave that makes its copy anew is there. nil where nobody reads it.
local function locate(waves, value, registry)
  local copy = COPIED[value]
  local at, readers, kind, residual, copied = nil, {}, copy and copy.type, nil, false
  for i, wave in ipairs(waves) do
    local node = wave.node
    local spec = registry.by_name[node.op]
    local alias = node.alias and node.alias[ops.IN]
    if alias and alias.value == value then        -- inserted before; whoever comes next reads what it leaves
      at, readers = i, {}
    elseif spec and (value ~= "x" or residual == nil or residual == (node.residual or 0)) then
      local written, read = region_named(spec.writes, value), region_named(spec.reads, value)
      read = read or copy and region_named(spec.reads, copy.name)
      copied = copied or copy ~= nil and node.op == copy.by
      if written then at, readers = i, {} end
      if read and not written then
        at = at or i - 1
        readers[#readers + 1] = wave
      end
      if written or read then
        kind = kind or (written or read).type
        residual = residual or node.residual or 0
      end
    end
  end
  if at and #readers > 0 then
    return { at = at, readers = readers, type = kind, residual = residual, copied = copied }
  end
end

-- What the op must know of the value, or nil after a message.
function Insert:shape_of(ins, place)
  local op, buffer = ins.spec, self.bases[ins.value] or ins.value == "x" and self.bases.x0
  if not buffer then return nil end                     -- the graph says so
  local function misfit(fmt, ...)
    if not ins.misfit then self.diag:error(ins.at.value, "insert: value '%s': " .. fmt, ins.value, ...) end
    ins.misfit = true
  end
  local function fits(region)
    return not region or region.type == place.type or region.type == "number"
      and (place.type == "f32" or place.type == "bf16")
  end
  local takes, gives = region_named(op.reads, ops.IN), region_named(op.writes, ops.OUT)
  if not fits(takes) or not fits(gives) then
    local region = fits(takes) and gives or takes
    return misfit("it is %s, and op '%s' has '%s' as %s", place.type, ins.op, region.name,
      region.type == "number" and "f32 or bf16" or region.type)
  end
  local width = buffer.width
  local by_rows = op.tile == "spread" or op.tile == "owner" or has(op.task, "width") or has(op.task, "tile_units")
  if by_rows and not width then
    return misfit("the family lays it out otherwise than in one row for each column, which op '%s' takes", ins.op)
  end
  if by_rows and (width % TILE ~= 0 or buffer.extent * TILE % width ~= 0) then
    return misfit("rows of %d elements in %d units cannot be dealt in tiles of %d elements", width, buffer.extent, TILE)
  end
  return {
    width = width, extent = buffer.extent, tile_units = by_rows and buffer.extent * TILE // width,
    is_bf16 = place.type == "bf16" and 1 or 0,
  }
end

local function with_alias(node, formal, value, suffix)
  local copy = {}
  for key, part in pairs(node) do copy[key] = part end
  copy.alias = {}
  for name, alias in pairs(node.alias or {}) do copy.alias[name] = alias end
  copy.alias[formal] = { value = value, suffix = suffix }
  return copy
end

-- Adds the insertion's node to the waves. state.suffix[value]: what the value's name has got behind it so far.
function Insert:place(ins, waves, place, state)
  local shape = self:shape_of(ins, place)
  if not shape then return end
  local op, value = ins.spec, ins.value
  local from = state.suffix[value] or ""
  local to = from
  if region_named(op.writes, ops.OUT) then
    to = from .. "." .. op.name
    state.suffix[value] = to
  end
  local fields = {}
  for name, number in pairs(ins.fields) do fields[name] = number end
  for _, name in ipairs(OF_VALUE) do
    if has(op.task, name) then fields[name] = shape[name] end
  end
  local node = {
    op = op.name, fields = fields, residual = place.residual, inserted = true,
    tiles = (op.tile == "spread" or op.tile == "owner") and shape.width // TILE or nil,
    units = op.tile == "cyclic" and shape.extent or nil,
    alias = { [ops.IN] = { value = value, suffix = from }, [ops.OUT] = { value = value, suffix = to } },
  }
  local copy = COPIED[value]
  for _, wave in ipairs(place.readers) do
    wave.node = with_alias(wave.node, value, value, to)
    if copy then wave.node = with_alias(wave.node, copy.name, copy.name, to) end
  end
  table.insert(waves, place.at + 1, { node = node })
  if copy and not place.copied then
    local alias = { [value] = { value = value, suffix = to }, [copy.name] = { value = copy.name, suffix = to } }
    table.insert(waves, place.at + 2, { node = { op = copy.by, residual = place.residual, inserted = true,
      tiles = self.bases[copy.name .. 0].width // TILE, alias = alias } })
  end
end

--- The waves of one layer (-1: those before, or those after the layers) with what is inserted there. A wave is
--- { node = the family's }; node.alias[formal] = { value, suffix } names another buffer than the formal's own.
function Insert:section(waves, layer)
  local state = { suffix = {} }
  for _, wave in ipairs(waves) do
    local op = self.registry.by_name[wave.node.op]
    if op then self.seen[op.name] = true end
    if op and op.wide and ops.is_wide(self.model.schedule.columns) then
      self.seen[op.wide], self.seen[op.name] = true, nil
    end
  end
  for _, ins in ipairs(self.list) do
    if ins.good and not ins.host and not HIDDEN[ins.value] and selects(ins, layer) then
      local place = locate(waves, ins.value, self.registry)
      if place then
        self:place(ins, waves, place, state)
        ins.hits, ins.hit[layer] = ins.hits + 1, true
      end
    end
  end
  return waves
end

-- ---------------------------------------------------------------- the end

-- Names that can stand in `value`, in order: { name, type, writes, reads = names of ops, width }, or of a point { name,
-- type, point = op's name }.
local function values_of(registry, seen, bases)
  local list, by_name = {}, {}
  for _, op in ipairs(registry.list) do
    for _, way in ipairs(seen[op.name] and { "writes", "reads" } or {}) do
      for _, r in ipairs(op.all[way]) do
        local name = VALUE_OF[r.name] or r.name
        if r.global and not HIDDEN[name] then
          if not by_name[name] then
            local buffer = bases[name] or name == "x" and bases.x0
            local kind = COPIED[name] and COPIED[name].type or r.type
            by_name[name] = { name = name, type = kind, writes = {}, reads = {}, width = buffer and buffer.width }
            list[#list + 1] = by_name[name]
          end
          -- of a sum, what its readers make of it
          if way == "reads" and not COPIED[name] then by_name[name].type = r.type end
          local users = by_name[name][way]
          if users[#users] ~= op.name then users[#users + 1] = op.name end
        end
      end
    end
    for _, point in ipairs(seen[op.name] and op.points or {}) do
      list[#list + 1] = { name = point.name, type = point.type, point = op.name }
    end
  end
  table.sort(list, function(a, b) return a.name < b.name end)
  return list
end

function Insert:no_place(ins)
  local names, known = {}, false
  for i, value in ipairs(self.all) do
    names[i] = value.name
    known = known or value.name == ins.value
  end
  if known then
    self.diag:error(ins.at.value, "insert: nobody reads '%s' %s", ins.value,
      ins.layers == "outside" and "outside the layers" or ins.layers and "in those layers" or "after it is written")
    return
  end
  for _, op in ipairs(self.registry.list) do
    for _, r in ipairs(self.seen[op.name] and op.writes or {}) do
      if r.name == ins.value and r.scope == "sm" then
        self.diag:error(ins.at.value,
          "insert: value '%s' stays on its SM, as op '%s' leaves it: nothing can be inserted", ins.value, op.name)
        return
      end
    end
  end
  self.diag:error(ins.at.value, "insert: unknown value '%s'%s; nmkgen plan lists them", ins.value,
    diags.hint(ins.value, names))
end

--- Requires: all sections seen. Leaves: mistakes of insertions that found no place; self.points.
function Insert:finish()
  self.all = values_of(self.registry, self.seen, self.bases)
  for _, ins in ipairs(self.list) do
    if ins.good and ins.host then
      if not self.seen[ins.host.name] then
        self:no_place(ins)
      elseif ins.layers ~= nil and ins.layers ~= "outside" then
        self.diag:error(ins.at.layers,
          "insert: '%s' is in the code of %s, which all its nodes share: leave out layers", ins.value, ins.host.name)
      else
        local at = self.points[ins.value] or {}
        at[#at + 1] = { op = ins.spec, params = ins.params }
        self.points[ins.value] = at
      end
    elseif ins.good and not ins.misfit then
      if ins.hits == 0 then
        self:no_place(ins)
      else
        for _, layer in ipairs(ins.wanted and ins.layers or {}) do
          if not ins.hit[layer] then
            self.diag:error(ins.wanted[layer], "insert: layers: nobody reads '%s' in layer %d", ins.value, layer)
          end
        end
      end
    end
  end
end

-- Places of an insertion all of which is in one place.
local function one_place(at)
  local places = setmetatable({}, { __index = function() return at end })
  return places, { with = places, layers = places }
end

--- Inserts an op as its own table says, if it says so and the spec does not insert it already.
function M.try(model, registry, name, diag)
  local op = registry.by_name[name]
  if not op then
    local names = {}
    for i, other in ipairs(registry.list) do names[i] = other.name end
    diag:error(nil, "--try: there is no op '%s'%s", name, diags.hint(name, names))
    return
  end
  model.insert = model.insert or {}
  for _, ins in ipairs(model.insert) do
    if ins.op == name then return end
  end
  if not op.try then return end
  local at, places = one_place({ file = op.file, line = op.try.line, col = 1 })
  table.insert(model.insert, { op = name, value = op.try.value, with = op.try.with, at = at, places = places })
end

-- Insertions of a family have one place: where the family makes them.
local function of_family(family, model)
  local list = {}
  if not family.insert then return list end
  local place = family.at("insert")
  for i, ins in ipairs(family.insert(model)) do
    local at, places = one_place(place)
    list[i] = { op = ins.op, value = ins.value, layers = ins.layers, with = ins.with, at = at, places = places }
  end
  return list
end

--- bases: the family's buffers by name; values: its numbers.
function M.new(model, registry, bases, values, diag)
  local self = setmetatable({
    model = model, registry = registry, bases = bases, values = values, diag = diag,
    seen = {},                  -- [op] = true where a node of the family has it
    params = {},                -- [op] = parameters of inserted nodes
    points = {},                -- [point] = { { op, params } ... } to be applied in order
    of_value = {}, list = of_family(model.family_module, model),
  }, Insert)
  for _, name in ipairs(OF_VALUE) do self.of_value[name] = true end
  table.move(model.insert or {}, 1, #(model.insert or {}), #self.list + 1, self.list)
  for _, ins in ipairs(self.list) do
    ins.with, ins.places.with, ins.hits, ins.hit = ins.with or {}, ins.places.with or {}, 0, {}
    self:prepare(ins)
  end
  return self
end

return M
