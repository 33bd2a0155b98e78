-- JSON as trees with positions: strict, so that a damaged file is one clear message and never a half-read value.
--
-- A node is { kind, value, at, doc }: kind "string", "number", "bool" or "null" with its value, "array" with nodes in
-- `items`, "object" with { key, value = node, at } in `items` and nodes by key in `by`.  Numbers without fraction and
-- exponent that fit 64 bits are integers, others floats.
local host = require("host")

local M = {}

local MAX_DEPTH = 64

local SPECIAL = '["\\\0-\31]'           -- what a text cannot simply hold
local ESCAPES = { b = "\b", f = "\f", n = "\n", r = "\r", t = "\t", ['"'] = '"', ["\\"] = "\\", ["/"] = "/" }
local WORDS = { ["true"] = { "bool", true }, ["false"] = { "bool", false }, null = { "null" } }

--- The place of a node, or of an item of an object, for a message; columns count characters.
function M.pos(node, doc)
  doc = doc or node.doc
  local line, start = 1, 1
  for at in doc.text:gmatch("()\n") do
    if at >= node.at then break end
    line, start = line + 1, at + 1
  end
  local before = doc.text:sub(start, node.at - 1)
  return { file = doc.file, line = line, col = 1 + (utf8.len(before) or #before) }
end

local Parser = {}
Parser.__index = Parser

local function fail(at, fmt, ...)
  error({ at = at, message = fmt:format(...) }, 0)
end

local function shown(text, at)
  if at > #text then return "the end of the file" end
  local char = text:match("^" .. utf8.charpattern, at)
  return char:find("^%c") and ("byte %d"):format(char:byte()) or ("'%s'"):format(char)
end

function Parser:expected(what)
  fail(self.at, "not JSON: expected %s, got %s", what, shown(self.text, self.at))
end

function Parser:skip()
  self.at = self.text:find("[^ \t\r\n]", self.at) or #self.text + 1
end

-- \uXXXX with its digits at `at`: the character and where the text goes on.  A pair of surrogates is one character.
function Parser:character(at)
  local digits = self.text:match("^%x%x%x%x", at)
  if not digits then fail(at - 2, "not JSON: \\u needs 4 hexadecimal digits") end
  local code = tonumber(digits, 16)
  if code < 0xd800 or code > 0xdfff then return utf8.char(code), at + 4 end
  local low = tonumber(self.text:match("^\\u(%x%x%x%x)", at + 4) or "0", 16)
  if code > 0xdbff or low < 0xdc00 or low > 0xdfff then
    fail(at - 2, "not JSON: \\u%s is half of a surrogate pair", digits)
  end
  return utf8.char(0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00)), at + 10
end

function Parser:string()
  local text, from = self.text, self.at
  local stop = text:find(SPECIAL, from + 1)
  if stop and text:byte(stop) == 34 then          -- the usual case: no escape
    self.at = stop + 1
    return text:sub(from + 1, stop - 1)
  end
  local parts, at = {}, from + 1
  while true do
    stop = text:find(SPECIAL, at)
    if not stop then fail(from, "not JSON: this text is not closed") end
    parts[#parts + 1] = text:sub(at, stop - 1)
    local char = text:sub(stop, stop)
    if char == '"' then
      self.at = stop + 1
      return table.concat(parts)
    elseif char ~= "\\" then
      fail(stop, "not JSON: byte %d inside a text", char:byte())
    end
    local escape = text:sub(stop + 1, stop + 1)
    if escape == "u" then
      parts[#parts + 1], at = self:character(stop + 2)
    elseif ESCAPES[escape] then
      parts[#parts + 1], at = ESCAPES[escape], stop + 2
    else
      fail(stop, "not JSON: unknown escape")
    end
  end
end

function Parser:number(node)
  local text, at = self.text, self.at
  local word = text:match("^-?[%w.+-]+", at)
  local whole, rest = (word or ""):match("^(-?%d+)(.*)$")
  if not whole or whole:find("^-?0%d") or not (rest == "" or rest:find("^%.%d+$") or rest:find("^[eE][+-]?%d+$")
      or rest:find("^%.%d+[eE][+-]?%d+$")) then
    fail(at, "not JSON: '%.20s' is no number", word or text:sub(at, at))
  end
  node.kind, node.value, self.at = "number", tonumber(word), at + #word
  if math.abs(node.value) == math.huge then fail(at, "the number '%.20s' is too large", word) end
end

function Parser:array(node, depth)
  node.kind, node.items = "array", {}
  self.at = self.at + 1
  self:skip()
  if self.text:byte(self.at) == 93 then
    self.at = self.at + 1
    return
  end
  while true do
    node.items[#node.items + 1] = self:value(depth + 1)
    self:skip()
    local char = self.text:byte(self.at)
    if char ~= 44 and char ~= 93 then self:expected("',' or ']'") end
    self.at = self.at + 1
    if char == 93 then return end
  end
end

function Parser:object(node, depth)
  node.kind, node.items, node.by = "object", {}, {}
  self.at = self.at + 1
  self:skip()
  if self.text:byte(self.at) == 125 then
    self.at = self.at + 1
    return
  end
  while true do
    self:skip()
    local at = self.at
    if self.text:byte(at) ~= 34 then self:expected("a key in double quotes") end
    local key = self:string()
    if node.by[key] then fail(at, "the key '%.60s' is given twice", key) end
    self:skip()
    if self.text:byte(self.at) ~= 58 then self:expected("':'") end
    self.at = self.at + 1
    local value = self:value(depth + 1)
    node.items[#node.items + 1], node.by[key] = { key = key, value = value, at = at }, value
    self:skip()
    local char = self.text:byte(self.at)
    if char ~= 44 and char ~= 125 then self:expected("',' or '}'") end
    self.at = self.at + 1
    if char == 125 then return end
  end
end

function Parser:value(depth)
  self:skip()
  local at = self.at
  local char, node = self.text:sub(at, at), { at = at, doc = self.doc }
  if depth > MAX_DEPTH then fail(at, "nested deeper than %d levels", MAX_DEPTH) end
  if char == "{" then
    self:object(node, depth)
  elseif char == "[" then
    self:array(node, depth)
  elseif char == '"' then
    node.kind, node.value = "string", self:string()
  elseif char:find("[%d-]") then
    self:number(node)
  else
    local name = self.text:match("^%a+", at) or ""
    local word = WORDS[name]
    if not word and name ~= "" then fail(at, "not JSON: '%.20s' is no value", name) end
    if not word then self:expected("a value") end
    node.kind, node.value, self.at = word[1], word[2], at + #name
  end
  return node
end

--- The tree of a text that messages call `file`; nil after a message.
function M.parse(text, file, diag)
  local doc = { text = text, file = file }
  local _, bad = utf8.len(text)
  if bad then
    diag:error(M.pos({ at = bad }, doc), "not UTF-8 text")
    return nil
  end
  local self = setmetatable({ text = text, at = 1, doc = doc }, Parser)
  local ok, result = pcall(function()
    if text:find("^\xef\xbb\xbf") then fail(1, "not JSON: begins with a byte order mark") end
    local node = self:value(0)
    self:skip()
    if self.at <= #text then self:expected("the end of the file") end
    return node
  end)
  if ok then return result end
  if type(result) ~= "table" then error(result, 0) end
  diag:error(M.pos(result, doc), "%s", result.message)
end

--- The object in a file; nil after a message, and nil alone where there is no such file and `optional` is true.
function M.load(path, diag, optional)
  local text, why = host.read(path)
  if not text then
    if not optional or host.realpath(path) then diag:error({ file = path }, "cannot be read: %s", why) end
    return nil
  end
  local node = M.parse(text, path, diag)
  if node and node.kind ~= "object" then
    diag:error(M.pos(node), "expected an object, got %s", M.text(node))
    return nil
  end
  return node
end

--- A node as a plain value: nil, a scalar, or a list; an object has none.  In a list null and objects are their text.
function M.plain(node)
  if not node or node.kind == "object" then return nil end
  if node.kind ~= "array" then return node.value end
  local list = {}
  for i, item in ipairs(node.items) do
    list[i] = M.plain(item)
    if list[i] == nil then list[i] = M.text(item) end
  end
  return list
end

--- A number as text that reads back as the same number.
function M.number(value)
  if math.type(value) == "integer" then return ("%d"):format(value) end
  local text = ("%.15g"):format(value)
  return tonumber(text) == value and text or ("%.17g"):format(value)
end

-- A plain value or a node as JSON text on one line.
local function write(value, out)
  if type(value) == "table" and value.kind and value.doc then
    if value.kind == "null" then
      out[#out + 1] = "null"
    elseif value.kind == "object" then
      for i, item in ipairs(value.items) do
        out[#out + 1] = i == 1 and "{" or ", "
        write(item.key, out)
        out[#out + 1] = ": "
        write(item.value, out)
      end
      out[#out + 1] = #value.items == 0 and "{}" or "}"
    elseif value.kind == "array" then
      write(value.items, out)
    else
      write(value.value, out)
    end
  elseif type(value) == "table" then
    out[#out + 1] = "["
    for i, item in ipairs(value) do
      if i > 1 then out[#out + 1] = ", " end
      write(item, out)
    end
    out[#out + 1] = "]"
  elseif type(value) == "string" then
    out[#out + 1] = '"' .. value:gsub('["\\]', "\\%0"):gsub("%c", function(c)
      return ("\\u%04x"):format(c:byte())
    end) .. '"'
  else
    out[#out + 1] = type(value) == "number" and M.number(value) or tostring(value)
  end
end

--- A node or a plain value as short JSON text for a message or a comment.
function M.text(value)
  local out = {}
  write(value, out)
  local text = table.concat(out)
  local cut = utf8.offset(text, 61)
  return cut and cut <= #text and text:sub(1, cut - 1) .. "..." or text
end

return M
