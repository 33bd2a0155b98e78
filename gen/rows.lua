-- YAML read by tables of rows: which keys a map may have, their types, ranges and defaults.
--
-- A row is { key, type, min =, max =, default =, doc = }; without a default the key is required, unless it is optional
-- and then may be nil.  Types:
--   int, number, bool   plain scalars            word    a name: letters, digits, . _ -; with choices =, one of them
--   map, shape          `keys` are its rows      ints    one int, or 8 of them
--   numbers             a list of numbers        order   a list of all waves (reader.waves)
--   maps                a list of maps, `keys` are the rows of each; at[key] of a map is the place of a key
--   layers              all, outside, or a list of layers    } places[key] of the map around has the place of each part
--   values              a map of numbers by any names        }
-- A mistake is reported at its place, and the reading goes on.
local diags = require("diag")

-- Of unknown keys that many are compared with the known ones.
local MOST_HINTS = 50

local M = {}

-- ---------------------------------------------------------------- rows

--- The row of a key.
function M.find(rows, key)
  for _, row in ipairs(rows) do
    if row[1] == key then return row end
  end
end

--- The keys of all rows.
function M.names(rows)
  local names = {}
  for i, row in ipairs(rows) do names[i] = row[1] end
  return names
end

function M.path(prefix, key)
  return prefix == "" and key or prefix .. "." .. key
end

--- A value of a model as text.
function M.text(value)
  if math.type(value) == "integer" then return ("%d"):format(value) end
  if math.type(value) == "float" then return ("%.15g"):format(value) end
  if type(value) ~= "table" then return tostring(value) end
  local texts = {}
  for i, v in ipairs(value) do texts[i] = M.text(v) end
  return "[" .. table.concat(texts, ", ") .. "]"
end

-- ---------------------------------------------------------------- types

-- What was written, for a message: short and on one line.
local function shown(node)
  if node.kind == "map" then return "a map" end
  if node.kind == "seq" then return "a list" end
  if node.style == "plain" and node.value == "" then return "nothing" end
  local text = node.value:gsub("%c", " ")
  if #text > 40 then text = text:sub(1, 37) .. "..." end
  return (node.style == "plain" and "'%s'" or 'the text "%s"'):format(text)
end

local function range(row)
  return ("from %s to %s"):format(M.text(row.min), M.text(row.max))
end

-- Plain scalars: value or nil.
local function int(node, row)
  local digits = node.kind == "scalar" and node.style == "plain" and node.value:match("^[+-]?%d+$")
  if not digits or digits:find("^[+-]?0%d") or #digits > 18 then return nil end
  local value = math.tointeger(tonumber(digits))
  if value < row.min or value > row.max then return nil end
  return value
end

local NUMBERS = { "^[+-]?%d+%.?%d*$", "^[+-]?%.%d+$", "^[+-]?%d+%.?%d*[eE][+-]?%d+$", "^[+-]?%.%d+[eE][+-]?%d+$" }

local function number(node, row)
  if node.kind ~= "scalar" or node.style ~= "plain" then return nil end
  for _, pattern in ipairs(NUMBERS) do
    if node.value:find(pattern) then
      local value = tonumber(node.value) + 0.0
      if value < row.min or value > row.max then return nil end
      return value
    end
  end
end

local function word(node, row)
  local value = node.kind == "scalar" and node.value:match("^%w[%w._-]*$") or nil
  for _, choice in ipairs(row and row.choices or { value }) do
    if choice == value then return value end
  end
end

local BOOLS = { ["true"] = true, ["false"] = false }

local function bool(node)
  if node.kind ~= "scalar" or node.style ~= "plain" then return nil end
  return BOOLS[node.value]
end

local Reader = {}
Reader.__index = Reader

-- A mistake at a node; `path` is how messages call what is there.
function Reader:error(node, path, fmt, ...)
  self.diag:error(node, "%s", (path ~= "" and path .. ": " or "") .. fmt:format(...))
end

function Reader:list(node, path, row, read)
  if node.kind ~= "seq" then
    self:error(node, path, "expected %s, got %s", M.expected(row), shown(node))
    return nil
  end
  local list, complete = {}, true
  for i, item in ipairs(node.items) do
    list[i] = read(item)
    complete = complete and list[i] ~= nil
  end
  return complete and list or nil
end

-- What a type takes as text, and either parse(node, row) or read(reader, node, path, row), which has its own messages.
local TYPES = {
  int = { text = function(row) return "an integer " .. range(row) end, parse = int },
  number = { text = function(row) return "a number " .. range(row) end, parse = number },
  word = { text = function(row)
      return row.choices and "one of " .. table.concat(row.choices, ", ") or "a word of a-z, A-Z, 0-9 and . _ -"
    end, parse = word },
  bool = { text = function() return "true or false" end, parse = bool },
  ints = { text = function(row) return "an integer " .. range(row) .. ", or a list of 8 such" end },
  numbers = { text = function(row) return "a list of numbers " .. range(row) end },
  order = { text = function() return "a list of waves" end },
  map = { text = function() return "a map" end },
}
TYPES.shape = TYPES.map

function TYPES.ints.read(reader, node, path, row)
  if node.kind ~= "seq" then
    local one = int(node, row)
    if one then return { one, one, one, one, one, one, one, one } end
    reader:error(node, path, "expected %s, got %s", M.expected(row), shown(node))
  elseif #node.items == 0 or #node.items % 8 ~= 0 then       -- columns beyond 8 come in eights
    reader:error(node, path, "expected 8 integers, one for each number of live columns, got %d", #node.items)
  else
    return reader:list(node, path, row, function(item)
      local value = int(item, row)
      if not value then reader:error(item, path, "expected an integer %s, got %s", range(row), shown(item)) end
      return value
    end)
  end
end

function TYPES.numbers.read(reader, node, path, row)
  return reader:list(node, path, row, function(item)
    local value = number(item, row)
    if not value then reader:error(item, path, "expected a number %s, got %s", range(row), shown(item)) end
    return value
  end)
end

-- Every wave once, and none before what it reads from.
function TYPES.order.read(reader, node, path, row)
  local waves = reader.waves
  if not waves then return nil end
  local names, place = M.names(waves), {}
  local list = reader:list(node, path, row, function(item)
    local wave = item.kind == "scalar" and item.value
    if not wave then
      reader:error(item, path, "expected a wave, got %s", shown(item))
    elseif not M.find(waves, wave) then
      reader:error(item, path, "unknown wave '%s'%s", wave, diags.hint(wave, names))
    elseif place[wave] then
      reader:error(item, path, "wave '%s' is given twice", wave)
    else
      place[wave] = item
      return wave
    end
  end)
  if node.kind ~= "seq" then return nil end
  for _, wave in ipairs(names) do
    if not place[wave] then
      reader:error(node, path, "wave '%s' is missing", wave)
      list = nil
    end
  end
  local rank = {}
  for i, wave in ipairs(list or {}) do rank[wave] = i end
  for _, wave in ipairs(list or {}) do
    for _, before in ipairs(M.find(waves, wave).after) do
      if rank[before] > rank[wave] then
        reader:error(place[wave], path, "'%s' must come after '%s', whose result it reads", wave, before)
      end
    end
  end
  return list
end

function TYPES.map.read(reader, node, path, row)
  return reader:map(node, path, row.keys)
end

TYPES.maps = { text = function() return "a list of maps" end }

function TYPES.maps.read(reader, node, path, row)
  local n = 0
  return reader:list(node, path, row, function(item)
    n = n + 1
    local called = ("%s[%d]"):format(path, n)
    local map = reader:map(item, called, row.keys)
    if map then
      map.at, map.places = {}, {}
      for _, key in ipairs(row.keys) do
        map.at[key[1]], map.places[key[1]] = reader.pos[M.path(called, key[1])], reader.places[M.path(called, key[1])]
      end
    end
    return map
  end)
end

TYPES.layers = { text = function() return "all, outside, or a list of layers" end }

function TYPES.layers.read(reader, node, path, row)
  if node.kind == "scalar" and (node.value == "all" or node.value == "outside") then return node.value end
  local places = {}
  local list = reader:list(node, path, row, function(item)
    local layer = int(item, { min = 0, max = 4095 })
    if not layer then reader:error(item, path, "expected the number of a layer, got %s", shown(item)) end
    places[#places + 1] = item
    return layer
  end)
  if list and #list == 0 then
    reader:error(node, path, "expected %s, got an empty list", M.expected(row))
    return nil
  end
  reader.places[path] = places
  return list
end

TYPES.values = { text = function() return "a map of numbers" end }

function TYPES.values.read(reader, node, path, row)
  if node.kind ~= "map" then
    reader:error(node, path, "expected %s, got %s", M.expected(row), shown(node))
    return nil
  end
  local values, places = {}, {}
  for _, item in ipairs(node.items) do
    local key = item.key and item.key.value
    local range_of = { min = -3e38, max = 3e38 }
    if key and item.value then
      local value = int(item.value, range_of) or number(item.value, range_of)
      if value == nil then
        reader:error(item.value, M.path(path, key), "expected a number, got %s", shown(item.value))
      else
        values[key], places[key] = value, item.value
      end
    end
  end
  reader.places[path] = places
  return values
end

--- What a row asks for, for a message.
function M.expected(row)
  return TYPES[row[2]].text(row)
end

-- ---------------------------------------------------------------- maps

local function copy(value)
  return type(value) == "table" and table.move(value, 1, #value, 1, {}) or value
end

-- The value of a key that is given; nil, after a message, where it is wrong.
function Reader:value(node, path, row)
  local kind = TYPES[row[2]]
  if kind.read then return kind.read(self, node, path, row) end
  local value = kind.parse(node, row)
  if value == nil then self:error(node, path, "expected %s, got %s", M.expected(row), shown(node)) end
  return value
end

-- The value of a key that is left out of the map `node`.
function Reader:default(node, path, row)
  if row[2] == "order" then return self.waves and M.names(self.waves) end
  if row.default == nil and row.optional then return nil end
  if row.default == nil then
    local map_path = path:match("^(.*)%.") or ""
    self:error(node, map_path, "missing key '%s' (%s), expected %s", row[1], row.doc, M.expected(row))
    return nil
  end
  if row[2] ~= "map" then return copy(row.default) end
  return self:map({ kind = "map", items = {}, file = node.file, line = node.line, col = node.col }, path, row.keys)
end

--- The values of a map.  Without rows (of an unknown family) it cannot be judged and gives none.  Leaves in self.pos
--- the place of every key: its value, or the map where the key is left out; in self.given those that are given.
function Reader:map(node, path, rows)
  if node.kind ~= "map" then
    self:error(node, path, "expected a map, got %s", shown(node))
    return nil
  end
  local values, given, known = {}, {}, M.names(rows or {})
  if not rows then return values end
  local unknown = {}
  for _, item in ipairs(node.items) do
    local key = item.key and item.key.value
    if key and not M.find(rows, key) then
      unknown[#unknown + 1] = item.key
    elseif key and given[key] == nil then
      given[key] = item.value or false
    end
  end
  -- A key meant by a misspelt one is not missing; its message is the other one.  Nobody misspells a thousand.
  for i, key in ipairs(unknown) do
    local hint, meant = "", nil
    if i <= MOST_HINTS then hint, meant = diags.hint(key.value, known) end
    self:error(key, M.path(path, key.value), "unknown key%s", hint)
    if meant and given[meant] == nil then given[meant] = false end
  end
  for _, row in ipairs(rows) do
    local key, at = row[1], M.path(path, row[1])
    self.pos[at], self.given[at] = given[key] or node, given[key] and true
    if given[key] then
      values[key] = self:value(given[key], at, row)
    elseif given[key] == nil then
      values[key] = self:default(node, at, row)
    end
  end
  return values
end

--- A reader: reader:map(tree, "", rows) gives the values; reader.pos[path] is then the place of every key, and
--- reader.given[path] says that it is written there.
function M.reader(diag)
  return setmetatable({ diag = diag, pos = {}, given = {}, places = {} }, Reader)
end

--- The tree of a YAML file, or of `text` in its place, which messages call `name`; nil where there is none.
function M.load(path, name, diag, text)
  local yaml = require("yaml")
  local tree, mistakes
  if text then
    tree, mistakes = yaml.parse(text, name)
  else
    tree, mistakes = yaml.load(path, name)
  end
  for _, mistake in ipairs(mistakes) do diag:error(mistake, "%s", mistake.message) end
  return tree
end

-- The item of a key in a map.
local function item_of(map, key)
  for _, item in ipairs(map.items) do
    if item.key and item.key.value == key then return item end
  end
end

--- The map `top` with the keys of the map `under` that it leaves out, maps inside them likewise.  Every node keeps its
--- place, so that messages name the file it comes from.  What is no map hides what is under it.
function M.overlay(top, under)
  if not under or top and top.kind ~= "map" or under.kind ~= "map" then return top or under end
  if not top then return under end
  local merged = { kind = "map", file = top.file, line = top.line, col = top.col, items = {} }
  for i, item in ipairs(top.items) do
    local other = item.key and item_of(under, item.key.value)
    local both = item.value and other and other.value and item.value.kind == "map" and other.value.kind == "map"
    merged.items[i] = both and { key = item.key, value = M.overlay(item.value, other.value) } or item
  end
  for _, item in ipairs(under.items) do
    if not (item.key and item_of(top, item.key.value)) then merged.items[#merged.items + 1] = item end
  end
  return merged
end

--- The map `tree` with `value` as its key `key`, which comes as its last if there is none.
function M.with(tree, key, value)
  local map = { kind = "map", file = tree.file, line = tree.line, col = tree.col, items = {} }
  for _, item in ipairs(tree.items) do
    if not (item.key and item.key.value == key) then map.items[#map.items + 1] = item end
  end
  local name = { kind = "scalar", style = "plain", value = key, file = value.file, line = value.line, col = value.col }
  map.items[#map.items + 1] = { key = name, value = value }
  return map
end

--- The value of a key of a map node; nil where there is none.
function M.get(tree, key)
  local item = tree.kind == "map" and item_of(tree, key)
  return item and item.value or nil
end

--- The value of a top-level key before the reading by rows, and its node; nil where it is not a word.
function M.peek(tree, key)
  if tree.kind ~= "map" then return nil end
  for _, item in ipairs(tree.items) do
    if item.key and item.key.value == key and item.value then return word(item.value), item.value end
  end
end

return M
