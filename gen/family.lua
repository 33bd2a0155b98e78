-- Families: specs/families/NAME.lua loaded and judged, in form before a spec is read by them, in substance for a model.
--
-- What a family gives is told at the top of specs/families/lib/decoder.lua, which most families are made with: a family
-- gets a file of that folder by library("decoder").  A shape row may say where config.json states its value:
--   config, or_config   the key, as a path with dots, and other places where the same fact may stand, | between them
--   config_default      what transformers takes where the file is silent: a value, or a function of the shape
--   config_note         how that default comes about, for the comment that `nmkgen init` writes
--   config_tensor       the tensor by which a silent file is read: true where the checkpoint lacks it
--   config_check        false: a checkpoint may say something else than the spec
--   from_config         function(read, shape) -> value, note: for what no one key says; read(path) is a value or nil
local diags = require("diag")
local host = require("host")
local rows = require("rows")

local M = {}

local function article(word)
  return (word:find("^[aeiou]") and "an " or "a ") .. word
end

local FAMILY = {
  { "name", "string" }, { "summary", "string" }, { "model_types", "table" }, { "shape", "table" },
  { "rules", "table" }, { "waves", "table" }, { "layer", "function" }, { "values", "function" },
  { "buffers", "function" }, { "front", "function" }, { "block", "function" }, { "back", "function" },
  { "arrays", "function" }, { "tensors", "function" }, { "rope", "function" }, { "config", "function" },
  { "residuals", "integer", optional = true }, { "insert", "function", optional = true },
  { "config_ignored", "table", optional = true }, { "config_said", "table", optional = true },
  { "prefill", "table", optional = true },
}

local PREFILL = {
  { "waves", "table" }, { "values", "function" }, { "buffers", "function" }, { "front", "function" },
  { "block", "function" },
}

-- What a family's functions give: { key, type, optional = true where it may be left out, choices = }.
local RECORDS = {
  buffers = { { "name", "string" }, { "bytes", "integer" }, { "extent", "integer" },
    { "width", "integer", optional = true } },
  node = {
    { "op", "string" }, { "tiles", "integer", optional = true }, { "units", "integer", optional = true },
    { "fields", "table", optional = true }, { "weights", "table", optional = true },
    { "residual", "integer", optional = true }, { "from", "table", optional = true },
  },
  arrays = {
    { "name", "string" }, { "layer0", "integer" }, { "layers", "integer" }, { "experts", "integer" },
    { "rows", "integer" }, { "cols", "integer" },
    { "layout", "string", choices = { "rows", "pairs", "gate_up", "vector", "halves64", "halves128" } },
  },
  tensors = {
    { "name", "string" }, { "layer0", "integer" }, { "layers", "integer" }, { "experts", "integer" },
    { "rows", "integer" }, { "cols", "integer" }, { "dims", "integer" }, { "array", "string" }, { "row0", "integer" },
    { "twin", "boolean", optional = true },
  },
  insert = {
    { "op", "string" }, { "value", "string" }, { "layers", "any", optional = true },
    { "with", "table", optional = true },
  },
  config = {
    { "path", "string" }, { "or_path", "string", optional = true }, { "value", "any" }, { "required", "boolean" },
  },
}

-- What a family file may use.  It can read nothing, knows no clock and has neither pairs nor random numbers, so it is
-- the same on every run.
local ENV = { "assert", "error", "ipairs", "select", "string", "table", "tonumber", "tostring", "type" }

-- `folder`: where library(name) finds NAME.lua, which sees the same as the family; `called`: that folder in messages.
local function environment(folder, called)
  local env, loaded = { math = {} }, {}
  for _, name in ipairs(ENV) do env[name] = _G[name] end
  for name, value in pairs(math) do env.math[name] = name:find("^random") == nil and value or nil end
  function env.library(name)
    if loaded[name] == nil then
      if type(name) ~= "string" or not name:find("^[%w_]+$") then error("library: expected a name", 2) end
      local text = host.read(("%s/lib/%s.lua"):format(folder, name))
      if not text then error(("there is no library '%s' in %s/lib"):format(name, called), 2) end
      local chunk, syntax = load(text, ("@%s/lib/%s.lua"):format(called, name), "t", env)
      if not chunk then error(syntax, 0) end
      loaded[name] = chunk() or false
    end
    return loaded[name]
  end
  return env
end

--- Lua's "file:12: message" as a position and a message; the file may be a library that the family uses.
function M.lua_error(file, why)
  local where, line, message = tostring(why):match("^([^:]*):(%d+): (.*)$")
  local known = where and where:find("^specs/") and where or file
  return { file = known, line = tonumber(line) or 1, col = 1 }, message or tostring(why)
end

--- Where a function of a family is made; file: where it has none.
function M.place(value, file)
  local made = debug.getinfo(value, "S")
  return { file = made.source:match("^@(.*)$") or file, line = made.linedefined, col = 1 }
end

-- Where a family's part is made.
local function place_of(text, file, name, value)
  if type(value) == "function" then return M.place(value, file) end
  local line = 0
  for row in (text .. "\n"):gmatch("(.-)\n") do
    line = line + 1
    local col = row:match("^%s*[%w_]+%.()" .. name .. "%s*=") or row:match("^%s*()" .. name .. "%s*=")
    if col then return { file = file, line = line, col = col } end
  end
  return { file = file, line = 1, col = 1 }
end

local function sorted_keys(t)
  local keys = {}
  for key in pairs(t) do keys[#keys + 1] = tostring(key) end
  table.sort(keys)
  return keys
end

local function kind_of(value)
  return math.type(value) == "integer" and "integer" or type(value)
end

local SHAPE_TYPES = { int = "number", number = "number", bool = "boolean", word = "string" }

local function is_shape_row(row)
  local kind = type(row) == "table" and type(row[1]) == "string" and SHAPE_TYPES[row[2]]
  if not kind or type(row.doc) ~= "string" then return false end
  if kind == "number" and (type(row.min) ~= "number" or type(row.max) ~= "number") then return false end
  if kind == "string" and type(row.choices) ~= "table" then return false end
  return row.default == nil or type(row.default) == kind
end

-- What a row's keys about config.json may hold.  Returns what is wrong, or nil.
local CONFIG_KEYS = {
  { "config", "string" }, { "or_config", "string" }, { "config_note", "string" }, { "config_tensor", "string" },
  { "config_check", "boolean" }, { "from_config", "function" },
}

local function config_mistake(row)
  for _, key in ipairs(CONFIG_KEYS) do
    local value = row[key[1]]
    if value ~= nil and type(value) ~= key[2] then
      return ("%s must be %s, not %s"):format(key[1], article(key[2]), article(kind_of(value)))
    end
  end
  local default = row.config_default
  if default ~= nil and type(default) ~= "function" and type(default) ~= SHAPE_TYPES[row[2]] then
    return ("config_default must be %s or a function, not %s"):format(article(SHAPE_TYPES[row[2]]),
      article(kind_of(default)))
  end
  if not row.config then
    for _, key in ipairs({ "or_config", "config_default", "config_note", "config_tensor" }) do
      if row[key] ~= nil then return ("%s without config"):format(key) end
    end
  end
end

local function is_rule(rule, shape)
  if type(rule) ~= "table" or not rows.find(shape, rule[1]) then return false end
  if rule.uses ~= nil and type(rule.uses) ~= "table" then return false end
  for _, use in ipairs(rule.uses or {}) do
    if not rows.find(shape, use) then return false end
  end
  return type(rule[2]) == "function" and type(rule[3]) == "string"
end

-- config.json's model_type names the family; where there are several, the shape says which one a model has.
local function check_model_types(family, at, diag)
  local said = false
  for _, row in ipairs(family.shape) do said = said or row.config == "model_type" end
  for i, name in ipairs(family.model_types) do
    if type(name) ~= "string" then diag:error(at("model_types"), "model_types[%d] is not a string", i) end
  end
  if #family.model_types == 0 then
    diag:error(at("model_types"), "model_types: no model_type of config.json is named")
  elseif #family.model_types > 1 and not said then
    diag:error(at("model_types"), 'model_types: of several, a key of shape has to say which, by config = "model_type"')
  end
end

-- The parts of the family's prefill.
local function check_prefill(prefill, at, diag)
  for _, key in ipairs(sorted_keys(prefill)) do
    if not rows.find(PREFILL, key) then
      diag:error(at("prefill"), "prefill: unknown part '%s'%s", key, diags.hint(key, rows.names(PREFILL)))
    end
  end
  for _, part in ipairs(PREFILL) do
    local value = prefill[part[1]]
    if kind_of(value) ~= part[2] then
      diag:error(at("prefill"), "prefill: part '%s' must be %s, not %s", part[1], article(part[2]),
        article(kind_of(value)))
    end
  end
end

-- The parts by which a spec is read.
local function check_tables(family, at, diag)
  local seen, stated = {}, {}
  for i, row in ipairs(family.shape) do
    if not is_shape_row(row) then
      diag:error(at("shape"), "shape: row %d is not { key, type, default =, doc = } of the type int or number with "
        .. "min = and max =, bool, or word with choices =", i)
      return
    elseif seen[row[1]] then
      diag:error(at("shape"), "shape: key '%s' is given twice", row[1])
    end
    seen[row[1]] = true
    local why = config_mistake(row)
    if why then
      diag:error(at("shape"), "shape: %s: %s", row[1], why)
    elseif row.config and stated[row.config] then
      diag:error(at("shape"), "shape: %s: '%s' of config.json is already the key '%s'", row[1], row.config,
        stated[row.config])
    end
    if row.config then stated[row.config] = row[1] end
  end
  check_model_types(family, at, diag)
  for i, rule in ipairs(family.rules) do
    if not is_rule(rule, family.shape) then
      diag:error(at("rules"), "rules: rule %d is not { key, test, expectation, uses = { keys } } of keys of shape", i)
    end
  end
  seen = {}
  for i, wave in ipairs(family.waves) do
    if type(wave) ~= "table" or type(wave[1]) ~= "string" or type(wave.after) ~= "table" then
      diag:error(at("waves"), "waves: entry %d is not { name, after = { names } }", i)
      return
    end
    for _, before in ipairs(wave.after) do
      if not seen[before] then
        diag:error(at("waves"), "waves: '%s' is after '%s', which does not stand before it", wave[1], tostring(before))
      end
    end
    seen[wave[1]] = true
  end
end

--- Loads specs/families/NAME.lua; nil, after a message, where it cannot be used.
function M.load(path, name, diag)
  local text, why = host.read(path)
  if not text then
    diag:error({ file = name, line = 1, col = 1 }, "cannot be read: %s", why)
    return nil
  end
  local chunk, syntax = load(text, "@" .. name, "t", environment(path:match("^(.*)/"), name:match("^(.*)/")))
  local ok, family = false, nil
  if chunk then
    ok, family = pcall(chunk)
    syntax = family
  end
  if not ok then
    local pos, message = M.lua_error(name, syntax)
    diag:error(pos, "%s", message)
    return nil
  end
  local before = diag:count()
  local places = {}
  local function at(key)
    places[key] = places[key] or place_of(text, name, key, family[key])
    return places[key]
  end
  if type(family) ~= "table" then
    diag:error({ file = name, line = 1, col = 1 }, "a family file returns a table, not %s", article(type(family)))
    return nil
  end
  for _, key in ipairs(sorted_keys(family)) do
    if not rows.find(FAMILY, key) then
      diag:error(at(key), "unknown part '%s'%s", key, diags.hint(key, rows.names(FAMILY)))
    end
  end
  for _, part in ipairs(FAMILY) do
    local value = family[part[1]]
    if value == nil and not part.optional then
      diag:error({ file = name, line = 1, col = 1 }, "missing part '%s', %s", part[1], article(part[2]))
    elseif value ~= nil and kind_of(value) ~= part[2] then
      diag:error(at(part[1]), "part '%s' must be %s, not %s", part[1], article(part[2]), article(kind_of(value)))
    end
  end
  if diag:count() > before then return nil end
  if family.name ~= name:match("([^/]*)%.lua$") then
    diag:error(at("name"), "name '%s' differs from the file's name", family.name)
  end
  check_tables(family, at, diag)
  if family.prefill then check_prefill(family.prefill, at, diag) end
  family.at = at
  return diag:count() == before and family or nil
end

-- One record that a family's function gave.  True where it can be used.
local function check_record(what, record, keys, pos, diag)
  local before = diag:count()
  if type(record) ~= "table" then
    diag:error(pos, "%s: expected a table, got %s", what, article(kind_of(record)))
    return false
  end
  for _, key in ipairs(sorted_keys(record)) do
    if not rows.find(keys, key) then
      diag:error(pos, "%s: unknown key '%s'%s", what, key, diags.hint(key, rows.names(keys)))
    end
  end
  for _, row in ipairs(keys) do
    local value = record[row[1]]
    if value == nil then
      if not row.optional then diag:error(pos, "%s: missing key '%s'", what, row[1]) end
    elseif row[2] ~= "any" and kind_of(value) ~= row[2] then
      diag:error(pos, "%s: %s must be %s, got %s", what, row[1], article(row[2]), article(kind_of(value)))
    elseif row.choices then
      local known = false
      for _, choice in ipairs(row.choices) do known = known or choice == value end
      if not known then
        diag:error(pos, "%s: %s '%s' is unknown%s", what, row[1], value, diags.hint(value, row.choices))
      end
    end
  end
  return diag:count() == before
end

-- Rows that a matrix may have beyond those of its tensors, as the rows of a tile are 16: the loader zeroes them.
local MOST_PADDING = 15

-- An element's size in the unit of row0: a vector's elements, a matrix's rows.
local function span(t, vector) return vector and t.cols or t.rows end

-- Every element of every array is filled by tensors, each row once; a twin repeats another one.
local function check_tensors(arrays, tensors, pos, diag)
  local by_name, array_names, parts = {}, {}, {}
  for i, array in ipairs(arrays) do
    by_name[array.name], array_names[i], parts[array] = array, array.name, {}
  end
  local function has_original(twin)
    for _, t in ipairs(tensors) do
      if not t.twin and t.array == twin.array and t.row0 == twin.row0 and t.rows == twin.rows and t.cols == twin.cols
          and t.layer0 == twin.layer0 and t.layers == twin.layers and t.dims == twin.dims then
        return true
      end
    end
    return false
  end
  for _, t in ipairs(tensors) do
    local a = by_name[t.array]
    local vector = a and a.layout == "vector"
    if not a then
      diag:error(pos, "tensor %s: unknown array '%s'%s", t.name, t.array, diags.hint(t.array, array_names))
    elseif t.experts ~= a.experts or (vector and t.rows ~= 1) or (not vector and t.cols ~= a.cols) then
      diag:error(pos, "tensor %s: %d columns and %d experts, but array '%s' has %d and %d", t.name, t.cols, t.experts,
        a.name, a.cols, a.experts)
    elseif t.layer0 < a.layer0 or t.layer0 + t.layers > a.layer0 + a.layers or t.row0 < 0
        or t.row0 + span(t, vector) > span(a, vector) then
      diag:error(pos, "tensor %s: layers %d to %d, %s %d to %d are not all in array '%s'", t.name, t.layer0,
        t.layer0 + t.layers - 1, vector and "elements" or "rows", t.row0, t.row0 + span(t, vector) - 1, a.name)
    elseif t.twin and not has_original(t) then
      diag:error(pos, "tensor %s: a twin, but no other tensor fills the same of array '%s'", t.name, t.array)
    elseif not t.twin then
      parts[a][#parts[a] + 1] = t
    end
  end
  for _, array in ipairs(arrays) do
    local vector = array.layout == "vector"
    local all, padding = span(array, vector), (vector or array.layout == "gate_up") and 0 or MOST_PADDING
    table.sort(parts[array], function(a, b) return a.row0 < b.row0 end)
    for layer = array.layer0, array.layer0 + array.layers - 1 do
      local row, once = 0, true
      for _, t in ipairs(parts[array]) do
        if once and layer >= t.layer0 and layer < t.layer0 + t.layers then
          once = t.row0 == row
          row = once and row + span(t, vector) or math.min(row, t.row0)
        end
      end
      if not once or row < all - padding then
        local unit = vector and "element" or "row"
        diag:error(pos, "array '%s': layer %d has %d %ss, and tensors do not fill %s %d just once", array.name, layer,
          all, unit, unit, row)
        break
      end
    end
  end
end

-- Every weight field of a node names an element of an array.
local function check_weights(what, node, arrays, pos, diag)
  for _, field in ipairs(sorted_keys(node.weights or {})) do
    local weight = node.weights[field]
    local array = type(weight) == "table" and rows.find(arrays, weight.array)
    if type(weight) ~= "table" or type(weight.array) ~= "string" then
      diag:error(pos, "%s: weights: %s: expected { array = name, layer = }", what, field)
    elseif not array then
      diag:error(pos, "%s: weights: %s: unknown array '%s'%s", what, field, weight.array,
        diags.hint(weight.array, rows.names(arrays)))
    elseif math.type(weight.layer) ~= "integer" or weight.layer < array[2] or weight.layer >= array[3] then
      diag:error(pos, "%s: weights: %s: array '%s' has layers %d to %d, not %s", what, field, array[1], array[2],
        array[3] - 1, tostring(weight.layer))
    end
  end
end

-- Frequencies: a number for each pair of dimensions, and scale.
local function check_rope(list, head_dim, pos, diag)
  local good = list == nil or (#list == head_dim // 2 and math.type(list.scale) == "float")
  for _, frequency in ipairs(list or {}) do good = good and math.type(frequency) == "float" end
  if not good then diag:error(pos, "rope: expected head_dim / 2 = %d numbers and scale", head_dim // 2) end
end

--- What the family makes of this model: every function runs, every record has its form.
function M.check(m, family, diag)
  local function call(part, ...)
    local ok, result = pcall(family[part], ...)
    if ok and type(result) == "table" then return result end
    if ok then
      diag:error(family.at(part), "%s: expected a table, got %s", part, article(kind_of(result)))
    else
      local pos, message = M.lua_error(family.at(part).file, result)
      diag:error(pos, "%s: %s", part, message)
    end
  end
  local function records(part, keys)
    local list = call(part, m)
    local ok = list ~= nil
    for i, record in ipairs(list or {}) do
      ok = check_record(("%s[%d]"):format(part, i), record, keys, family.at(part), diag) and ok
    end
    return ok and list or nil
  end
  local function check_config(list)
    local stated = { model_type = true }
    for _, row in ipairs(family.shape) do stated[row.config or row] = row.config_check ~= false end
    for i, fact in ipairs(list) do
      if stated[fact.path] then
        diag:error(family.at("config"), "config[%d]: '%s' is stated already, by shape, by model_types or in this list",
          i, fact.path)
      end
      stated[fact.path] = true
    end
  end
  local before = diag:count()
  local arrays, tensors = records("arrays", RECORDS.arrays), records("tensors", RECORDS.tensors)
  if not arrays or not tensors then return end
  check_tensors(arrays, tensors, family.at("tensors"), diag)
  local spans = {}
  for i, a in ipairs(arrays) do spans[i] = { a.name, a.layer0, a.layer0 + a.layers } end

  for i = 0, m.shape.layers - 1 do
    local block = call("block", i, m)
    if diag:count() > before then return end
    for _, wave in ipairs(sorted_keys(block)) do
      local what = ("block(%d).%s"):format(i, wave)
      if not rows.find(family.waves, wave) then
        diag:error(family.at("block"), "%s: unknown wave%s", what, diags.hint(wave, rows.names(family.waves)))
      end
      if check_record(what, block[wave], RECORDS.node, family.at("block"), diag) then
        check_weights(what, block[wave], spans, family.at("block"), diag)
        local residual, residuals = block[wave].residual or 0, family.residuals or 1
        if residual < 0 or residual >= residuals then
          diag:error(family.at("block"), "%s: residual must be 0 to %d, less than the family's residuals; it is %d",
            what, residuals - 1, residual)
        end
      end
    end
    if diag:count() > before then return end
  end
  call("values", m)
  for _, part in ipairs({ "front", "back" }) do
    for i, node in ipairs(records(part, RECORDS.node) or {}) do
      check_weights(("%s[%d]"):format(part, i), node, spans, family.at(part), diag)
    end
  end
  records("buffers", RECORDS.buffers)
  if family.insert then records("insert", RECORDS.insert) end
  check_rope(call("rope", m), m.shape.head_dim, family.at("rope"), diag)
  check_config(records("config", RECORDS.config) or {})
end

--- What transformers takes for a row where config.json is silent; nil where it has to say.
function M.config_default(row, shape)
  if type(row.config_default) == "function" then return row.config_default(shape) end
  return row.config_default
end

--- What a checkpoint's config.json must say of the model: { path, or_path, value, required }.  Each key of shape that
--- names its place there, and what the family's config(m) adds.
function M.config(m)
  local family, list = m.family_module, {}
  if #family.model_types == 1 then
    list[1] = { path = "model_type", value = family.model_types[1], required = true }
  end
  for _, row in ipairs(family.shape) do
    if row.config and row.config_check ~= false then
      local value = m.shape[row[1]]
      list[#list + 1] = { path = row.config, or_path = row.or_config, value = value,
                          required = not row.config_tensor and M.config_default(row, m.shape) ~= value }
    end
  end
  return table.move(family.config(m), 1, #family.config(m), #list + 1, list)
end

return M
