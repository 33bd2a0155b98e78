--- What a compiled chat template computes with: Python's values and Jinja's filters, tests and methods, in Lua.
--
--   str, int, float, bool   Lua's string (UTF-8), integer, float, boolean
--   None                    `none`
--   everything else         a table with `kind`: list and tuple (items from 1), dict, view (of a dict), iter (what a
--                           generator would give, once), undefined, namespace, loop
--   callable                a Lua function of (named arguments or nil, arguments...); the named ones are
--                           { "name", name = value }
--
-- A template reaches these tables only through the functions here, so no name it uses can lead anywhere else.
-- `c` is what template.c gives: the parts that need UTF-8, Python's number text or a clock.  Nothing here catches
-- errors, so no template can run on after a limit was hit.

local c = ...

local type, mtype, concat, floor = type, math.type, table.concat, math.floor

local MAX_CALLS <const> = 200 -- macros within macros
local MAX_RANGE <const> = 100000
local MAX_DEPTH <const> = 500 -- of lists within lists, where they are printed or compared

local M = { filters = {}, tests = {} }
local none = { kind = "none" }
M.none = none

local calls, level = 0, 0
local variables, globals -- of the render that runs

--- The error carries no line: whoever catches it looks for the template's line on the stack.
local function fail(fmt, ...) error({ message = select("#", ...) > 0 and fmt:format(...) or fmt }, 0) end

---------------------------------------------------------------------------------------------------- values

local repr, str, eq

local TYPE_NAMES <const> = {
  none = "NoneType", list = "list", tuple = "tuple", dict = "dict", iter = "generator", undefined = "Undefined",
  namespace = "Namespace", loop = "LoopContext",
}

local function type_name(v)
  local t = type(v)
  if t == "string" then return "str" end
  if t == "boolean" then return "bool" end
  if t == "number" then return mtype(v) == "integer" and "int" or "float" end
  if t == "function" then return "function" end
  return v.kind == "view" and v.name or TYPE_NAMES[v.kind]
end

local function undefined(text, is_message)
  return { kind = "undefined", name = not is_message and text or nil, message = is_message and text or nil }
end
M.undefined = undefined

local function no_element(object, key) return { kind = "undefined", object = object, key = key } end

local function is_undefined(v) return type(v) == "table" and v.kind == "undefined" end

local OBJECT_NAMES <const> = { namespace = "jinja2.utils.Namespace", loop = "jinja2.runtime.LoopContext" }

local function object_name(v)
  return (type(v) == "table" and OBJECT_NAMES[v.kind] or type_name(v)) .. " object"
end

local function fail_undefined(v)
  if v.message then fail("%s", v.message) end
  if v.name then fail("'%s' is undefined", v.name) end
  local object = v.object == none and "None" or object_name(v.object)
  if type(v.key) == "string" then fail("'%s' has no attribute %s", object, c.repr(v.key)) end
  fail("%s has no element %s", object, repr(v.key))
end

local function new_list(items, kind)
  items.kind = kind or "list"
  return items
end

local function hash(key)
  local t = type(key)
  if t == "string" then return key end
  if t == "number" then return key == key and key or "\0nan" end
  if t == "boolean" then return key and 1 or 0 end
  if key == none or t == "function" then return key end
  if key.kind == "undefined" then return "\0undefined" end
  if key.kind == "tuple" then return "\0" .. repr(key) end
  fail("unhashable type: '%s'", type_name(key))
end

local function new_dict() return { kind = "dict", keys = {}, vals = {}, map = {} } end

local function dict_set(d, key, value)
  local h = hash(key)
  local i = d.map[h]
  if not i then
    i = #d.keys + 1
    d.map[h], d.keys[i] = i, key
  end
  d.vals[i] = value
end

local function dict_get(d, key)
  local i = d.map[hash(key)]
  if i then return d.vals[i] end
end

function M.dict(pairs_list)
  local d = new_dict()
  for i = 1, #pairs_list, 2 do dict_set(d, pairs_list[i], pairs_list[i + 1]) end
  return d
end

local function truth(v)
  if v == true then return true end
  if not v then return false end
  local t = type(v)
  if t == "string" then return v ~= "" end
  if t == "number" then return v ~= 0 end
  if t == "function" then return true end
  local kind = v.kind
  if kind == "none" or kind == "undefined" then return false end
  if kind == "list" or kind == "tuple" or kind == "view" then return v[1] ~= nil end
  if kind == "dict" then return v.keys[1] ~= nil end
  return true
end
M.truth = truth

-- The parts of Python's `and`, `or` and `if else`: see the compiler.
local FALSE <const> = { kind = "none" }
function M.pick(v) if truth(v) then return v end end
function M.unless(v)
  if v == false then return FALSE end
  if not truth(v) then return v end
end
function M.box(v)
  if v == false then return FALSE end
  return v
end
function M.unbox(v)
  if v == FALSE then return false end
  return v
end

local function deeper()
  level = level + 1
  if level > MAX_DEPTH then fail("lists within lists: nested too deeply") end
end

local function number_text(v) return mtype(v) == "integer" and ("%d"):format(v) or c.float(v) end

local function joined(items, f, separator)
  local parts = {}
  for i = 1, #items do parts[i] = f(items[i]) end
  return concat(parts, separator or ", ")
end

function repr(v)
  local t = type(v)
  if t == "string" then return c.repr(v) end
  if t == "number" then return number_text(v) end
  if t == "boolean" then return v and "True" or "False" end
  if t == "function" then return "<function>" end
  local kind = v.kind
  if kind == "none" then return "None" end
  if kind == "undefined" then return "Undefined" end
  deeper()
  local text
  if kind == "list" then
    text = "[" .. joined(v, repr) .. "]"
  elseif kind == "tuple" then
    text = "(" .. joined(v, repr) .. (#v == 1 and ",)" or ")")
  elseif kind == "view" then
    text = v.name .. "([" .. joined(v, repr) .. "])"
  elseif kind == "dict" then
    local parts = {}
    for i, key in ipairs(v.keys) do parts[i] = repr(key) .. ": " .. repr(v.vals[i]) end
    text = "{" .. concat(parts, ", ") .. "}"
  else
    text = "<" .. type_name(v) .. ">"
  end
  level = level - 1
  return text
end

function str(v)
  if type(v) == "string" then return v end
  if is_undefined(v) then return "" end
  return repr(v)
end
M.str = str

function M.out(o, v) o[#o + 1] = type(v) == "string" and v or str(v) end

function M.concat(o) return concat(o) end

function M.cat(...)
  local parts = { ... }
  for i = 1, #parts do parts[i] = str(parts[i]) end
  return concat(parts)
end

local function chars(s)
  local list, n = {}, 0
  for char in s:gmatch(utf8.charpattern) do
    n = n + 1
    list[n] = char
  end
  return list
end

--- The items of anything that can be iterated, as a list that must not be changed, and their number.
local function iter(v)
  if type(v) == "string" then
    local list = chars(v)
    return list, #list
  end
  if type(v) == "table" then
    local kind = v.kind
    if kind == "list" or kind == "tuple" or kind == "view" then return v, #v end
    if kind == "dict" then return v.keys, #v.keys end
    if kind == "undefined" then return {}, 0 end
    if kind == "iter" then
      local rest = v.at == 1 and v.items or table.move(v.items, v.at, #v.items, 1, {})
      v.at = #v.items + 1
      return rest, #rest
    end
  end
  fail("'%s' object is not iterable", type_name(v))
end
M.iter = iter

local function new_iter(items) return { kind = "iter", items = items, at = 1 } end

function M.unpack(v, wanted)
  if type(v) ~= "table" or is_undefined(v) then
    if is_undefined(v) then fail("not enough values to unpack (expected %d, got 0)", wanted) end
    if type(v) ~= "string" then fail("cannot unpack non-iterable %s object", type_name(v)) end
  end
  local items, n = iter(v)
  if n < wanted then fail("not enough values to unpack (expected %d, got %d)", wanted, n) end
  if n > wanted then fail("too many values to unpack (expected %d)", wanted) end
  return items
end

local function length(v)
  if type(v) == "string" then return c.len(v) end
  if type(v) == "table" then
    local kind = v.kind
    if kind == "list" or kind == "tuple" or kind == "view" then return #v end
    if kind == "dict" then return #v.keys end
    if kind == "undefined" then return 0 end
    if kind == "loop" then return v.n end
  end
  fail("object of type '%s' has no len()", type_name(v))
end

---------------------------------------------------------------------------------------------------- comparing

local function same_items(a, b)
  if #a ~= #b then return false end
  for i = 1, #a do
    if not eq(a[i], b[i]) then return false end
  end
  return true
end

local function same_members(a, b)
  if #a.keys ~= #b.keys then return false end
  for i, key in ipairs(a.keys) do
    local other = dict_get(b, key)
    if other == nil or not eq(a.vals[i], other) then return false end
  end
  return true
end

function eq(a, b)
  if a == b then return true end
  local ta, tb = type(a), type(b)
  if ta == "boolean" and tb == "number" then return (a and 1 or 0) == b end
  if ta == "number" and tb == "boolean" then return a == (b and 1 or 0) end
  if ta ~= "table" or tb ~= "table" or a.kind ~= b.kind then return false end
  local kind = a.kind
  if kind == "undefined" then return true end
  if kind ~= "list" and kind ~= "tuple" and kind ~= "dict" then return false end
  deeper()
  local same
  if kind == "dict" then same = same_members(a, b) else same = same_items(a, b) end
  level = level - 1
  return same
end
M.eq = eq

function M.ne(a, b) return not eq(a, b) end

local function number(v)
  if type(v) == "number" then return v end
  if type(v) == "boolean" then return v and 1 or 0 end
end

local function check_defined(a, b)
  if is_undefined(a) then fail_undefined(a) end
  if is_undefined(b) then fail_undefined(b) end
end

-- a < b.  `symbol` is what the template says; with `swapped` it has the two the other way round.
local function lt(a, b, symbol, swapped)
  if type(a) == "string" and type(b) == "string" then return c.less(a, b) end
  local x, y = number(a), number(b)
  if x and y then return x < y end
  if type(a) == "table" and type(b) == "table" and a.kind == b.kind and (a.kind == "list" or a.kind == "tuple") then
    for i = 1, math.min(#a, #b) do
      if not eq(a[i], b[i]) then return lt(a[i], b[i], symbol, swapped) end
    end
    return #a < #b
  end
  if swapped then a, b = b, a end
  check_defined(a, b)
  fail("'%s' not supported between instances of '%s' and '%s'", symbol, type_name(a), type_name(b))
end

local function nan(v) return v ~= v end
function M.lt(a, b) return lt(a, b, "<") end
function M.gt(a, b) return lt(b, a, ">", true) end
function M.le(a, b) return not nan(a) and not nan(b) and not lt(b, a, "<=", true) end
function M.ge(a, b) return not nan(a) and not nan(b) and not lt(a, b, ">=") end

local function contains(item, container)
  if type(container) == "string" then
    if type(item) ~= "string" then
      check_defined(item)
      fail("'in <string>' requires string as left operand, not %s", type_name(item))
    end
    return c.find(container, item, 1) ~= nil
  end
  if type(container) == "table" then
    local kind = container.kind
    if kind == "dict" then return dict_get(container, item) ~= nil end
    if kind ~= "none" and kind ~= "namespace" then
      local items, n = iter(container)
      for i = 1, n do
        if eq(items[i], item) then return true end
      end
      return false
    end
  end
  fail("argument of type '%s' is not iterable", type_name(container))
end
M.contains = contains

local CHAIN <const> = {
  eq = eq, ne = M.ne, lt = M.lt, le = M.le, gt = M.gt, ge = M.ge, ["in"] = contains,
  notin = function(a, b) return not contains(a, b) end,
}

--- a < b < c: { a, "lt", function() return b end, "lt", ... }; what comes after a false one is not computed.
function M.chain(list)
  local left = list[1]
  for i = 2, #list, 2 do
    local right = list[i + 1]()
    if not CHAIN[list[i]](left, right) then return false end
    left = right
  end
  return true
end

---------------------------------------------------------------------------------------------------- computing

local function fail_operands(symbol, a, b)
  check_defined(a, b)
  fail("unsupported operand type(s) for %s: '%s' and '%s'", symbol, type_name(a), type_name(b))
end

-- Python's integers have no end; where ours would wrap, that is an error.
local function too_large() fail("an integer that does not fit 64 bits") end

local function is_sequence(v) return type(v) == "table" and (v.kind == "list" or v.kind == "tuple") end

local function add(a, b)
  if type(a) == "string" and type(b) == "string" then return a .. b end
  local x, y = number(a), number(b)
  if x and y then
    local sum = x + y
    if mtype(sum) == "integer" and (x ~ sum) & (y ~ sum) < 0 then too_large() end
    return sum
  end
  check_defined(a, b)
  if is_sequence(a) and is_sequence(b) and a.kind == b.kind then
    local list = table.move(a, 1, #a, 1, {})
    return new_list(table.move(b, 1, #b, #a + 1, list), a.kind)
  end
  if type(a) == "string" then fail('can only concatenate str (not "%s") to str', type_name(b)) end
  if is_sequence(a) then fail('can only concatenate %s (not "%s") to %s', a.kind, type_name(b), a.kind) end
  fail_operands("+", a, b)
end
M.add = add

function M.addn(...)
  local terms = { ... }
  local all = true
  for i = 1, #terms do
    if type(terms[i]) ~= "string" then
      all = false
      break
    end
  end
  if all then return concat(terms) end
  local sum = terms[1]
  for i = 2, #terms do sum = add(sum, terms[i]) end
  return sum
end

function M.sub(a, b)
  local x, y = number(a), number(b)
  if not (x and y) then fail_operands("-", a, b) end
  local difference = x - y
  if mtype(difference) == "integer" and (x ~ y) & (x ~ difference) < 0 then too_large() end
  return difference
end

local function multiply(x, y)
  local product = x * y
  if mtype(product) == "integer" and math.abs(x * 1.0 * y) >= 0x1p63 then too_large() end
  return product
end

local function repeated(v, count)
  if count <= 0 then return type(v) == "string" and "" or new_list({}, v.kind) end
  if #v * count * (type(v) == "string" and 1 or 16) > c.memory() then fail("a result beyond the limit of memory") end
  if type(v) == "string" then return v:rep(count) end
  local list, n = {}, #v
  for i = 0, count - 1 do table.move(v, 1, n, i * n + 1, list) end
  return new_list(list, v.kind)
end

function M.mul(a, b)
  local x, y = number(a), number(b)
  if x and y then return multiply(x, y) end
  if y and not (type(a) == "string" or is_sequence(a)) then fail_operands("*", a, b) end
  if x and (type(b) == "string" or is_sequence(b)) then a, y = b, x end
  if not y or not (type(a) == "string" or is_sequence(a)) then
    check_defined(a, b)
    fail("can't multiply sequence by non-int of type '%s'", type_name(b))
  end
  if mtype(y) ~= "integer" then fail("can't multiply sequence by non-int of type 'float'") end
  return repeated(a, y)
end

local function divisor(symbol, a, b)
  local x, y = number(a), number(b)
  if not (x and y) then fail_operands(symbol, a, b) end
  if y == 0 then fail(symbol == "/" and "division by zero" or "integer division or modulo by zero") end
  return x, y
end

function M.div(a, b)
  local x, y = divisor("/", a, b)
  return x / y
end

function M.floordiv(a, b)
  local x, y = divisor("//", a, b)
  return x // y
end

function M.pow(a, b)
  local x, y = number(a), number(b)
  if not (x and y) then fail_operands("**", a, b) end
  if mtype(x) == "integer" and mtype(y) == "integer" and y >= 0 then
    if y > 64 and x ~= 0 and x ~= 1 and x ~= -1 then too_large() end
    local power = 1
    for _ = 1, y > 64 and y % 2 + 2 or y do power = multiply(power, x) end
    return power
  end
  if x == 0 and y < 0 then fail("0.0 cannot be raised to a negative power") end
  local power = x ^ y
  if nan(power) and not nan(x) and not nan(y) then fail("complex numbers are not supported") end
  return power
end

function M.neg(a)
  local x = number(a)
  if not x then
    check_defined(a)
    fail("bad operand type for unary -: '%s'", type_name(a))
  end
  if x == math.mininteger then too_large() end
  return -x
end

function M.pos(a)
  local x = number(a)
  if not x then
    check_defined(a)
    fail("bad operand type for unary +: '%s'", type_name(a))
  end
  return x
end

local function to_integer(v, what)
  if type(v) == "boolean" then return v and 1 or 0 end
  if mtype(v) == "integer" then return v end
  if is_undefined(v) then fail_undefined(v) end
  fail("%s must be an integer, not %s", what, type_name(v))
end

-- Pads to `width` characters; align is "<", ">" or "^".
local function padded(s, width, align, fill)
  if width > c.memory() then fail("a result beyond the limit of memory") end
  local missing = width - c.len(s)
  if missing <= 0 then return s end
  local left = align == "<" and 0 or align == ">" and missing or missing // 2
  return fill:rep(left) .. s .. fill:rep(missing - left)
end

local CONVERSIONS <const> = "diufFeEgGxXosrac%"

--- s % args as Python does it for text.  named: a dict, or nil.  For a dict or a list no argument needs to be used.
local function percent(s, args, named, lenient)
  local parts, at, used = {}, 1, 0
  while true do
    local mark = s:find("%", at, true)
    if not mark then break end
    parts[#parts + 1] = s:sub(at, mark - 1)
    local name, rest = s:match("^(%b())()", mark + 1)
    local flags, width, precision, kind, after = s:match("^([-+ #0]*)(%d*)(%.?%d*)[hlL]?(.)()", rest or mark + 1)
    if not kind then fail("incomplete format") end
    if not CONVERSIONS:find(kind, 1, true) then fail("unsupported format character '%s'", kind) end
    at = after
    if kind == "%" then
      parts[#parts + 1] = "%"
    else
      local value
      if name then
        if not named then fail("format requires a mapping") end
        value = dict_get(named, name:sub(2, -2))
        if value == nil then fail("%s", c.repr(name:sub(2, -2))) end
      else
        used = used + 1
        value = args[used]
        if value == nil then fail("not enough arguments for format string") end
      end
      if #width > 6 or #precision > 3 then fail("a width or precision that is too large") end
      local text
      if kind == "s" or kind == "r" or kind == "a" then
        text = kind == "s" and str(value) or repr(value)
        if precision ~= "" then text = c.slice(text, 0, math.min(c.len(text), tonumber(precision:sub(2)) or 0)) end
      elseif kind == "c" then
        text = type(value) == "string" and value or utf8.char(to_integer(value, "%c"))
      else
        local x = number(value)
        if not x then
          check_defined(value)
          fail("%%%s format: a real number is required, not %s", kind, type_name(value))
        end
        if kind == "i" or kind == "u" then kind = "d" end
        if ("dxXo"):find(kind, 1, true) then
          x = math.tointeger(x) or math.tointeger(x < 0 and math.ceil(x) or floor(x)) or too_large()
        end
        local zero = flags:find("0", 1, true) and not flags:find("-", 1, true)
        local sign = flags:find("+", 1, true) and "+" or flags:find(" ", 1, true) and " " or ""
        text = ("%" .. sign .. (flags:find("#", 1, true) and "#" or "") .. precision .. kind):format(x)
        if zero and #text < (tonumber(width) or 0) then
          local prefix, digits = text:match("^([-+ ]?)(.*)$")
          text = prefix .. ("0"):rep(tonumber(width) - #text) .. digits
        end
      end
      parts[#parts + 1] = padded(text, tonumber(width) or 0, flags:find("-", 1, true) and "<" or ">", " ")
    end
  end
  parts[#parts + 1] = s:sub(at)
  if not lenient and args[used + 1] ~= nil then fail("not all arguments converted during string formatting") end
  return concat(parts)
end

function M.mod(a, b)
  if type(a) == "string" then
    local kind = type(b) == "table" and b.kind
    local lenient = kind and kind ~= "tuple" and kind ~= "none"
    return percent(a, kind == "tuple" and b or { b }, kind == "dict" and b or nil, lenient)
  end
  local x, y = divisor("%", a, b)
  if mtype(x) == "float" and y == math.huge and x < 0 then return y end
  return x % y
end

---------------------------------------------------------------------------------------------------- calling

--- A function of (self, named, ...) from one that takes its arguments in order, nil where none was given.
local function takes(name, names, f)
  local most = #names
  return function(self, named, ...)
    local count = select("#", ...)
    if not named and count <= most then return f(self, ...) end
    if count > most then fail("%s() takes at most %d arguments (%d given)", name, most, count) end
    local args = { ... }
    for _, key in ipairs(named) do
      local place
      for i = 1, most do
        if names[i] == key then place = i end
      end
      if not place then fail("%s() got an unexpected keyword argument '%s'", name, key) end
      if place <= count then fail("%s() got multiple values for argument '%s'", name, key) end
      args[place] = named[key]
    end
    return f(self, table.unpack(args, 1, most))
  end
end

local methods = { string = {}, list = {}, tuple = {}, dict = {}, loop = {}, undefined = {} }
-- Python has these, and transformers' sandbox refuses them.
local REFUSED <const> = {
  list = { clear = 1, extend = 1, insert = 1, pop = 1, remove = 1, reverse = 1, sort = 1 },
  dict = { clear = 1, pop = 1, popitem = 1, setdefault = 1, update = 1 },
}

M.dict_names = {} -- attributes that every dict has, whatever its keys are

local function unsafe(object, name)
  return undefined(("access to attribute '%s' of '%s' object is unsafe."):format(name, type_name(object)), true)
end

local LOOP <const> = {
  index = function(l) return l.i end,
  index0 = function(l) return l.i - 1 end,
  revindex = function(l) return l.n - l.i + 1 end,
  revindex0 = function(l) return l.n - l.i end,
  first = function(l) return l.i == 1 end,
  last = function(l) return l.i == l.n end,
  length = function(l) return l.n end,
  depth = function() return 1 end,
  depth0 = function() return 0 end,
  previtem = function(l)
    local item = l.items[l.i - 1]
    if item == nil then return undefined("there is no previous item", true) end
    return item
  end,
  nextitem = function(l)
    local item = l.items[l.i + 1]
    if item == nil then return undefined("there is no next item", true) end
    return item
  end,
}

function M.loop(items, n) return { kind = "loop", items = items, n = n, i = 0 } end

local function bound(method, self)
  return function(named, ...) return method(self, named, ...) end
end

--- What Python's getattr finds, or nil: methods and the fields of our own objects.
local function attribute(object, name)
  if type(object) == "table" then
    local kind = object.kind
    if kind == "undefined" then fail_undefined(object) end
    if kind == "namespace" and object.vars[name] ~= nil then return object.vars[name] end
    if kind == "loop" and LOOP[name] then return LOOP[name](object) end
    local method = methods[kind] and methods[kind][name]
    if method then return bound(method, object) end
    if REFUSED[kind] and REFUSED[kind][name] then return unsafe(object, name) end
  elseif type(object) == "string" then
    local method = methods.string[name]
    if method then return bound(method, object) end
  end
  if name:sub(1, 2) == "__" and name:sub(-2) == "__" then return unsafe(object, name) end
end

local function item(object, key)
  if type(object) == "table" then
    local kind = object.kind
    if kind == "dict" then
      if is_sequence(key) and key.kind == "list" or type(key) == "table" and key.kind == "dict" then return end
      return dict_get(object, key)
    end
    if kind == "undefined" then fail_undefined(object) end
    if kind ~= "list" and kind ~= "tuple" then return end
    local i = type(key) == "boolean" and (key and 1 or 0) or key
    if mtype(i) == "integer" then return object[i >= 0 and i + 1 or #object + i + 1] end
  elseif type(object) == "string" then
    local i = type(key) == "boolean" and (key and 1 or 0) or key
    if mtype(i) ~= "integer" then return end
    local n = c.len(object)
    if i < 0 then i = i + n end
    if i >= 0 and i < n then return c.slice(object, i, i + 1) end
  end
end

local function getattr(object, name)
  local value
  if type(object) == "table" and object.kind == "dict" and not M.dict_names[name] and name:sub(1, 2) ~= "__" then
    value = dict_get(object, name)
  else
    value = attribute(object, name)
  end
  if value == nil then value = item(object, name) end
  if value == nil then return no_element(object, name) end
  return value
end
M.getattr = getattr

--- The same for a name that neither begins with _ nor is in dict_names.
function M.field(object, name)
  if type(object) == "table" and object.map then
    local i = object.map[name]
    if i then return object.vals[i] end
  end
  return getattr(object, name)
end

local function getitem(object, key)
  local value = item(object, key)
  if value == nil and type(key) == "string" then value = attribute(object, key) end
  if value == nil then return no_element(object, key) end
  return value
end
M.getitem = getitem

-- Python's slice.indices: first, last (exclusive) and step for a length.
local function indices(n, from, to, step)
  local function bound_of(v, default, low, high)
    if v == nil or v == none then return default end
    if is_undefined(v) or type(v) ~= "boolean" and mtype(v) ~= "integer" then
      fail("slice indices must be integers or None or have an __index__ method")
    end
    v = to_integer(v, "an index")
    if v < 0 then v = v + n end
    return v < low and low or v > high and high or v
  end
  step = (step == nil or step == none) and 1 or step
  if type(step) ~= "boolean" and mtype(step) ~= "integer" then
    fail("slice indices must be integers or None or have an __index__ method")
  end
  step = to_integer(step, "a step")
  if step == 0 then fail("slice step cannot be zero") end
  if step > 0 then return bound_of(from, 0, 0, n), bound_of(to, n, 0, n), step end
  return bound_of(from, n - 1, -1, n - 1), bound_of(to, -1, -1, n - 1), step
end

function M.slice(object, from, to, step)
  if is_undefined(object) then fail_undefined(object) end
  if type(object) ~= "string" and not is_sequence(object) then
    if type(object) == "table" and object.kind == "dict" then fail("unhashable type: 'slice'") end
    fail("'%s' object is not subscriptable", type_name(object))
  end
  local first, last, by = indices(length(object), from, to, step)
  if type(object) == "string" and by == 1 then return first < last and c.slice(object, first, last) or "" end
  local items, list = iter(object), {}
  for i = first, by > 0 and last - 1 or last + 1, by do list[#list + 1] = items[i + 1] end
  return type(object) == "string" and concat(list) or new_list(list, object.kind)
end

function M.call(f, named, ...)
  if type(f) == "function" then return f(named, ...) end
  if is_undefined(f) then fail_undefined(f) end
  fail("'%s' object is not callable", type_name(f))
end

--- object.name(...)
function M.callm(object, name, named, ...)
  local kind = type(object)
  local set = methods[kind == "table" and object.kind or kind]
  local method = set and set[name]
  if method and kind ~= "undefined" then return method(object, named, ...) end
  return M.call(getattr(object, name), named, ...)
end

--- The arguments of a call with *star and **stars: named ones, then the others.
function M.spread(star, stars, named, ...)
  local args = { ... }
  local n = select("#", ...)
  if star then
    local items, count = iter(star)
    if n + count > 100 then fail("too many arguments") end
    for i = 1, count do args[n + i] = items[i] end
    n = n + count
  end
  if stars then
    if type(stars) ~= "table" or stars.kind ~= "dict" then
      fail("argument after ** must be a mapping, not %s", type_name(stars))
    end
    named = named or {}
    for i, key in ipairs(stars.keys) do
      if type(key) ~= "string" then fail("keywords must be strings") end
      if named[key] ~= nil then fail("got multiple values for keyword argument '%s'", key) end
      named[#named + 1], named[key] = key, stars.vals[i]
    end
  end
  return named, table.unpack(args, 1, n)
end

local NOTHING <const> = {}

--- A macro.  f gets the table of its scope, filled with the arguments that were given, and the names of the others.
function M.macro(name, params, uses_caller, uses_kwargs, uses_varargs, f)
  return function(named, ...)
    local scope, count, extra = {}, select("#", ...), 0
    local args = { ... }
    for i, param in ipairs(params) do
      if i <= count then scope[param] = args[i] end
    end
    local kwargs = new_dict()
    for _, key in ipairs(named or {}) do
      local known = uses_caller and key == "caller"
      for i, param in ipairs(params) do known = known or param == key and i > count end
      if known then
        scope[key] = named[key]
      elseif uses_kwargs then
        dict_set(kwargs, key, named[key])
      else
        fail("macro '%s' takes no keyword argument '%s'", name, key)
      end
    end
    local varargs = {}
    for i = #params + 1, count do
      extra = extra + 1
      varargs[extra] = args[i]
    end
    if extra > 0 and not uses_varargs then
      fail("macro '%s' takes not more than %d argument(s)", name, #params)
    end
    local lacks = NOTHING
    for _, param in ipairs(params) do
      if scope[param] == nil then
        lacks = lacks == NOTHING and {} or lacks
        lacks[param] = true
        scope[param] = undefined(("parameter '%s' was not provided"):format(param), true)
      end
    end
    if uses_caller and scope.caller == nil then scope.caller = undefined("No caller defined", true) end
    if uses_kwargs then scope.kwargs = kwargs end
    if uses_varargs then scope.varargs = new_list(varargs, "tuple") end
    calls = calls + 1
    if calls > MAX_CALLS then fail("macro '%s': nested too deeply", name) end
    local text = f(scope, lacks)
    calls = calls - 1
    return text
  end
end

function M.setns(object, name, value)
  if type(object) ~= "table" or object.kind ~= "namespace" then
    fail("cannot assign attribute on non-namespace object")
  end
  object.vars[name] = value
end

function M.missing(kind, name) fail("No %s named '%s'.", kind, name) end

---------------------------------------------------------------------------------------------------- JSON

local function json_key(key)
  if type(key) == "string" then return key end
  if type(key) == "number" then return number_text(key) end
  if type(key) == "boolean" then return key and "true" or "false" end
  if key == none then return "null" end
  fail("keys must be str, int, float, bool or None, not %s", type_name(key))
end

local function json_number(v)
  if nan(v) then return "NaN" end
  if v == math.huge then return "Infinity" end
  if v == -math.huge then return "-Infinity" end
  return number_text(v)
end

local function json_sorted(d)
  local order = {}
  for i, key in ipairs(d.keys) do order[i] = { key = key, value = d.vals[i] } end
  return M.merge_sort(order, function(a, b) return lt(a.key, b.key, "<") end)
end

-- options: ascii, indent (text of one level or nil), comma, colon, sort
local function json(o, v, options, margin)
  local t = type(v)
  if t == "string" then
    o[#o + 1] = c.quote(v, options.ascii)
  elseif t == "number" then
    o[#o + 1] = json_number(v)
  elseif t == "boolean" then
    o[#o + 1] = v and "true" or "false"
  elseif v == none then
    o[#o + 1] = "null"
  elseif t == "table" and (v.kind == "dict" or v.kind == "list" or v.kind == "tuple") then
    local is_dict = v.kind == "dict"
    local n = is_dict and #v.keys or #v
    if n == 0 then
      o[#o + 1] = is_dict and "{}" or "[]"
      return
    end
    deeper()
    local inner = options.indent and margin .. options.indent
    local entries = is_dict and options.sort and json_sorted(v)
    o[#o + 1] = is_dict and "{" or "["
    for i = 1, n do
      if i > 1 then o[#o + 1] = options.comma end
      if inner then o[#o + 1] = inner end
      local value = v[i]
      if is_dict then
        o[#o + 1] = c.quote(json_key(entries and entries[i].key or v.keys[i]), options.ascii)
        o[#o + 1] = options.colon
        if entries then value = entries[i].value else value = v.vals[i] end
      end
      json(o, value, options, inner)
    end
    if inner then o[#o + 1] = margin end
    o[#o + 1] = is_dict and "}" or "]"
    level = level - 1
  else
    fail("Object of type %s is not JSON serializable", type_name(v))
  end
end

local function given(v) return v ~= nil and v ~= none end

M.filters.tojson = takes("tojson", { "ensure_ascii", "indent", "separators", "sort_keys" },
  function(v, ensure_ascii, indent, separators, sort_keys)
    local options = { ascii = ensure_ascii ~= nil and truth(ensure_ascii), comma = ", ", colon = ": " }
    options.sort = sort_keys ~= nil and truth(sort_keys)
    if given(indent) then
      if type(indent) ~= "string" then
        indent = padded("", math.max(0, to_integer(indent, "indent")), "<", " ")
      end
      options.indent, options.comma = indent, ","
    end
    if given(separators) then
      local pair = M.unpack(separators, 2)
      options.comma, options.colon = str(pair[1]), str(pair[2])
    end
    local o = {}
    json(o, v, options, options.indent and "\n")
    return concat(o)
  end)

---------------------------------------------------------------------------------------------------- methods

local function need_string(v, name)
  if type(v) ~= "string" then
    if is_undefined(v) then fail_undefined(v) end
    fail("%s: expected str, not %s", name, type_name(v))
  end
  return v
end

local function method(kind, name, names, f) methods[kind][name] = takes(name, names, f) end

--- s.split(sep, max) for a separator that is text; max < 0: no limit.
local function split(s, separator, max)
  if separator == "" then fail("empty separator") end
  local list, at = {}, 1
  while max < 0 or #list < max do
    local found = c.find(s, separator, at)
    if not found then break end
    list[#list + 1] = s:sub(at, found - 1)
    at = found + #separator
  end
  list[#list + 1] = s:sub(at)
  return new_list(list)
end

local function rsplit(s, separator, max)
  local all = split(s, separator, -1)
  if max < 0 or #all <= max + 1 then return all end
  local head = concat(table.move(all, 1, #all - max, 1, {}), separator)
  return new_list(table.move(all, #all - max + 1, #all, 2, { head }))
end

local function replace(s, old, new, count)
  if old == "" then
    local list, parts = chars(s), {}
    for i = 1, #list + 1 do
      if count < 0 or i <= count then parts[#parts + 1] = new end
      parts[#parts + 1] = list[i]
    end
    return concat(parts)
  end
  if not c.find(s, old, 1) then return s end
  local list = split(s, old, count)
  if (#list - 1) * #new > c.memory() then fail("a result beyond the limit of memory") end
  return concat(list, new)
end

local function or_default(v, default, what) return given(v) and to_integer(v, what) or default end

for name, mode in pairs({ strip = 3, lstrip = 1, rstrip = 2 }) do
  method("string", name, { "chars" }, function(s, set)
    if not given(set) then return c.strip(s, nil, mode) end
    return c.strip(s, need_string(set, name), mode)
  end)
end
for _, name in ipairs({ "upper", "lower", "title", "capitalize", "swapcase" }) do
  method("string", name, {}, function(s) return c.case(s, name) end)
end
method("string", "casefold", {}, function(s) return c.case(s, "lower") end)
for _, name in ipairs({ "isspace", "isdigit", "isalpha", "isalnum", "isupper", "islower" }) do
  method("string", name, {}, function(s) return c.is(s, name) end)
end
methods.string.isdecimal, methods.string.isnumeric = methods.string.isdigit, methods.string.isdigit

method("string", "split", { "sep", "maxsplit" }, function(s, separator, max)
  max = or_default(max, -1, "maxsplit")
  if not given(separator) then return new_list(c.words(s, max)) end
  return split(s, need_string(separator, "split"), max)
end)
method("string", "rsplit", { "sep", "maxsplit" }, function(s, separator, max)
  max = or_default(max, -1, "maxsplit")
  if given(separator) then return rsplit(s, need_string(separator, "rsplit"), max) end
  local words = c.words(s, -1)
  if max >= 0 and #words > max + 1 then fail("rsplit without a separator takes no limit here") end
  return new_list(words)
end)
method("string", "splitlines", { "keepends" }, function(s, keep)
  return new_list(c.lines(s, keep ~= nil and truth(keep)))
end)

local function affix(name, test)
  method("string", name, { "affix", "start", "end" }, function(s, affixes, from, to)
    if from ~= nil or to ~= nil then s = M.slice(s, from, to) end
    if type(affixes) == "table" and affixes.kind == "tuple" then
      for _, a in ipairs(affixes) do
        if test(s, need_string(a, name)) then return true end
      end
      return false
    end
    return test(s, need_string(affixes, name))
  end)
end
local function starts(s, a) return s:sub(1, #a) == a end
local function ends(s, a) return #s >= #a and s:sub(#s - #a + 1) == a end
affix("startswith", starts)
affix("endswith", ends)
method("string", "removeprefix", { "prefix" }, function(s, a)
  return starts(s, need_string(a, "removeprefix")) and s:sub(#a + 1) or s
end)
method("string", "removesuffix", { "suffix" }, function(s, a)
  return ends(s, need_string(a, "removesuffix")) and s:sub(1, #s - #a) or s
end)
method("string", "replace", { "old", "new", "count" }, function(s, old, new, count)
  return replace(s, need_string(old, "replace"), need_string(new, "replace"), or_default(count, -1, "count"))
end)
method("string", "join", { "iterable" }, function(s, v)
  local items, n = iter(v)
  for i = 1, n do
    if type(items[i]) ~= "string" then
      fail("sequence item %d: expected str instance, %s found", i - 1, type_name(items[i]))
    end
  end
  if n * #s > c.memory() then fail("a result beyond the limit of memory") end
  return concat(items, s, 1, n)
end)

local function find(s, sub, from, to, last)
  local window, offset = s, 0
  if from ~= nil or to ~= nil then
    local n = c.len(s)
    local first, stop = indices(n, from, to)
    if given(from) and mtype(from) == "integer" and from > n then return -1 end
    window, offset = first < stop and c.slice(s, first, stop) or "", first
  end
  local at = c.find(window, sub, 1, last)
  return at and c.len(window:sub(1, at - 1)) + offset or -1
end
for name, last in pairs({ find = false, rfind = true, index = false, rindex = true }) do
  method("string", name, { "sub", "start", "end" }, function(s, sub, from, to)
    local at = find(s, need_string(sub, name), from, to, last)
    if at < 0 and name:find("index", 1, true) then fail("substring not found") end
    return at
  end)
end
method("string", "count", { "sub" }, function(s, sub)
  if need_string(sub, "count") == "" then return c.len(s) + 1 end
  return #split(s, sub, -1) - 1
end)
for name, last in pairs({ partition = false, rpartition = true }) do
  method("string", name, { "sep" }, function(s, separator)
    if need_string(separator, name) == "" then fail("empty separator") end
    local at = c.find(s, separator, 1, last)
    if not at then return new_list(last and { "", "", s } or { s, "", "" }, "tuple") end
    return new_list({ s:sub(1, at - 1), separator, s:sub(at + #separator) }, "tuple")
  end)
end
for name, align in pairs({ ljust = "<", rjust = ">", center = "^" }) do
  method("string", name, { "width", "fillchar" }, function(s, width, fill)
    fill = fill == nil and " " or need_string(fill, name)
    if c.len(fill) ~= 1 then fail("The fill character must be exactly one character long") end
    width = to_integer(width, "width")
    if align ~= "^" then return padded(s, width, align, fill) end
    local missing = width - c.len(s)
    if missing <= 0 then return s end
    return padded(padded(s, width - missing + missing // 2 + (missing & width & 1), ">", fill), width, "<", fill)
  end)
end
method("string", "zfill", { "width" }, function(s, width)
  local sign, digits = s:match("^([-+]?)(.*)$")
  return sign .. padded(digits, to_integer(width, "width") - #sign, ">", "0")
end)

-- One value by a format specification: [[fill]align][sign][0][width][,][.precision][type].
local function formatted(value, spec)
  if spec == "" then return str(value) end
  local fill, align, rest = spec:match("^(" .. utf8.charpattern .. ")([<>^])(.*)$")
  if not fill then
    align, rest = spec:match("^([<>^]?)(.*)$")
    fill = " "
  end
  local sign, zero, width, comma, precision, kind = rest:match("^([-+ ]?)(0?)(%d*)(,?)(%.?%d*)([sdfFeEgGxXobn%%]?)$")
  if not sign or #width > 6 or #precision > 3 then fail("Invalid format specifier '%s'", spec) end
  local text
  if type(value) == "string" then
    if kind ~= "" and kind ~= "s" then fail("Unknown format code '%s' for object of type 'str'", kind) end
    text = precision ~= "" and c.slice(value, 0, math.min(c.len(value), tonumber(precision:sub(2)) or 0)) or value
    align = align ~= "" and align or "<"
  else
    local x = number(value)
    if not x then fail("unsupported format string passed to %s.__format__", type_name(value)) end
    if kind == "" and precision == "" and type(value) ~= "boolean" then
      text = number_text(x)
    elseif mtype(x) == "integer" and (kind == "" or ("dnxXo"):find(kind, 1, true)) then
      text = ("%" .. ((kind == "n" or kind == "") and "d" or kind)):format(x)
    elseif kind == "%" then
      text = ("%" .. (precision ~= "" and precision or ".6") .. "f"):format(x * 100) .. "%"
    elseif kind ~= "" and ("fFeEgG"):find(kind, 1, true) then
      text = ("%" .. precision .. kind):format(x)
    elseif kind == "" then
      text = ("%" .. precision .. "g"):format(x)
    else
      fail("Unknown format code '%s' for object of type '%s'", kind, type_name(value))
    end
    if (sign == "+" or sign == " ") and text:sub(1, 1) ~= "-" then text = sign .. text end
    if comma ~= "" then
      local head, digits, tail = text:match("^([-+ ]?)(%d+)(.*)$")
      digits = digits:reverse():gsub("(%d%d%d)", "%1,"):reverse():gsub("^,", "")
      text = head .. digits .. tail
    end
    if zero ~= "" and align == "" and tonumber(width) then
      local head, digits = text:match("^([-+ ]?)(.*)$")
      return head .. padded(digits, tonumber(width) - #head, ">", "0")
    end
    align = align ~= "" and align or ">"
  end
  return padded(text, tonumber(width) or 0, align, fill)
end

--- s.format(...)
local function format(s, args, named)
  local parts, at, automatic = {}, 1, 0
  while true do
    local mark = s:find("[{}]", at)
    if not mark then break end
    parts[#parts + 1] = s:sub(at, mark - 1)
    local char = s:sub(mark, mark)
    if s:sub(mark + 1, mark + 1) == char then
      parts[#parts + 1] = char
      at = mark + 2
    else
      if char == "}" then fail("Single '}' encountered in format string") end
      local close = s:find("}", mark, true)
      if not close then fail("expected '}' before end of string") end
      local field, spec = s:sub(mark + 1, close - 1):match("^([^:]*):?(.*)$")
      local path, conversion = field:match("^([^!]*)!?(%a?)$")
      if not path or spec:find("{", 1, true) then fail("this format string is not supported") end
      local first, rest = path:match("^([^%.%[]*)(.*)$")
      local value
      if first == "" then
        automatic = automatic + 1
        value = args[automatic]
      elseif first:find("^%d+$") then
        value = args[tonumber(first) + 1]
      else
        value = named[first]
      end
      if value == nil then
        fail(first == "" and "Replacement index out of range for positional args tuple" or "%s", c.repr(first))
      end
      while rest ~= "" do
        local name, after = rest:match("^%.([%w_]+)(.*)$")
        if name then
          value = getattr(value, name)
        else
          name, after = rest:match("^%[([^%]]+)%](.*)$")
          if not name then fail("this format string is not supported") end
          value = getitem(value, math.tointeger(tonumber(name)) or name)
        end
        if is_undefined(value) then fail_undefined(value) end
        rest = after
      end
      if conversion == "r" then value = repr(value) elseif conversion == "s" then value = str(value) end
      parts[#parts + 1] = formatted(value, spec)
      at = close + 1
    end
  end
  parts[#parts + 1] = s:sub(at)
  return concat(parts)
end
function methods.string.format(s, named, ...) return format(s, { ... }, named or {}) end

local function view(name, items)
  items.kind, items.name = "view", name
  return items
end
local function pairs_of(d)
  local list = {}
  for i, key in ipairs(d.keys) do list[i] = new_list({ key, d.vals[i] }, "tuple") end
  return list
end
method("dict", "items", {}, function(d) return view("dict_items", pairs_of(d)) end)
method("dict", "keys", {}, function(d) return view("dict_keys", table.move(d.keys, 1, #d.keys, 1, {})) end)
method("dict", "values", {}, function(d) return view("dict_values", table.move(d.vals, 1, #d.vals, 1, {})) end)
method("dict", "get", { "key", "default" }, function(d, key, default)
  local value = dict_get(d, key)
  if value ~= nil then return value end
  if default ~= nil then return default end
  return none
end)
method("dict", "copy", {}, function(d)
  local copy = new_dict()
  for i, key in ipairs(d.keys) do dict_set(copy, key, d.vals[i]) end
  return copy
end)

for name in pairs(methods.dict) do M.dict_names[name] = true end
for name in pairs(REFUSED.dict) do M.dict_names[name] = true end

-- transformers' sandbox refuses append; templates written for other engines use it, and it harms nothing here.
method("list", "append", { "item" }, function(list, v)
  list[#list + 1] = v
  return none
end)
method("list", "copy", {}, function(list) return new_list(table.move(list, 1, #list, 1, {})) end)
for _, kind in ipairs({ "list", "tuple" }) do
  method(kind, "count", { "value" }, function(list, v)
    local n = 0
    for i = 1, #list do n = n + (eq(list[i], v) and 1 or 0) end
    return n
  end)
  method(kind, "index", { "value" }, function(list, v)
    for i = 1, #list do
      if eq(list[i], v) then return i - 1 end
    end
    fail("%s is not in %s", repr(v), kind)
  end)
end

function methods.loop.cycle(l, _, ...)
  local n = select("#", ...)
  if n == 0 then fail("no items for cycling given") end
  return (select((l.i - 1) % n + 1, ...))
end
function methods.loop.changed(l, _, ...)
  local now = new_list({ ... }, "tuple")
  local changed = l.seen == nil or not eq(l.seen, now)
  l.seen = now
  return changed
end

---------------------------------------------------------------------------------------------------- filters

local F = M.filters
local function filter(name, names, f) F[name] = takes(name, names, f) end

--- Stable, and whatever `less` answers it ends.
local function merge_sort(list, less)
  local n, from, to = #list, table.move(list, 1, #list, 1, {}), {}
  local width = 1
  while width < n do
    for low = 1, n, 2 * width do
      local i, mid, high = low, math.min(low + width, n + 1), math.min(low + 2 * width, n + 1)
      local j = mid
      for k = low, high - 1 do
        if i < mid and (j >= high or not less(from[j], from[i])) then
          to[k], i = from[i], i + 1
        else
          to[k], j = from[j], j + 1
        end
      end
    end
    from, to, width = to, from, 2 * width
  end
  return from
end
M.merge_sort = merge_sort

local function folded(v) return type(v) == "string" and c.case(v, "lower") or v end

--- A function that follows "a.b.0" from a value.
local function getter(path, default)
  if not given(path) then return function(v) return v end end
  local parts = {}
  if type(path) == "string" then
    for i, part in ipairs(split(path, ".", -1)) do
      parts[i] = part:find("^%d+$") and math.tointeger(tonumber(part)) or part
    end
  else
    parts[1] = path
  end
  return function(v)
    for _, part in ipairs(parts) do
      v = getitem(v, part)
      if default ~= nil and default ~= none and is_undefined(v) then v = default end
    end
    return v
  end
end

local function sort_by(list, key, reverse)
  local entries = {}
  for i = 1, #list do entries[i] = { key = key(list[i]), value = list[i] } end
  -- Python's reverse keeps equal items in their order.
  local sorted = merge_sort(entries, reverse and function(a, b) return lt(b.key, a.key, "<") end
    or function(a, b) return lt(a.key, b.key, "<") end)
  local result = {}
  for i = 1, #sorted do result[i] = sorted[i].value end
  return new_list(result)
end

local function items_of(v)
  local items, n = iter(v)
  return table.move(items, 1, n, 1, {}), n
end

local function flag(v) return v ~= nil and truth(v) end

filter("default", { "default_value", "boolean" }, function(v, default, boolean)
  if is_undefined(v) or flag(boolean) and not truth(v) then
    if default == nil then return "" end
    return default
  end
  return v
end)
F.d = F.default
filter("length", {}, length)
F.count = F.length
filter("string", {}, str)
filter("safe", {}, str)
filter("upper", {}, function(v) return c.case(str(v), "upper") end)
filter("lower", {}, function(v) return c.case(str(v), "lower") end)
filter("capitalize", {}, function(v) return c.case(str(v), "capitalize") end)
filter("title", {}, function(v) return c.case(str(v), "words") end)
filter("trim", { "chars" }, function(v, set)
  return c.strip(str(v), given(set) and need_string(set, "trim") or nil, 3)
end)
filter("replace", { "old", "new", "count" }, function(v, old, new, count)
  if old == nil or new == nil then fail("replace: needs what to replace and with what") end
  return replace(str(v), str(old), str(new), or_default(count, -1, "count"))
end)
filter("escape", {}, function(v)
  local s = str(v)
  for _, pair in ipairs({ { "&", "&amp;" }, { "<", "&lt;" }, { ">", "&gt;" }, { '"', "&#34;" }, { "'", "&#39;" } }) do
    s = replace(s, pair[1], pair[2], -1)
  end
  return s
end)
F.e, F.forceescape = F.escape, F.escape
filter("center", { "width" }, function(v, width)
  return methods.string.center(str(v), nil, width == nil and 80 or width)
end)
function F.format(v, named, ...)
  if not named then return percent(str(v), { ... }) end
  local d = new_dict()
  for _, key in ipairs(named) do dict_set(d, key, named[key]) end
  return percent(str(v), {}, d, true)
end
filter("wordcount", {}, function(v)
  local n, within = 0, false
  for _, char in ipairs(chars(str(v))) do
    local word = char == "_" or c.is(char, "isalnum")
    if word and not within then n = n + 1 end
    within = word
  end
  return n
end)

filter("indent", { "width", "first", "blank" }, function(v, width, first, blank)
  if type(v) ~= "string" then
    if is_undefined(v) then fail_undefined(v) end
    fail("indent: expected str, not %s", type_name(v))
  end
  if width == nil then width = 4 end
  local margin = type(width) == "string" and width or padded("", math.max(0, to_integer(width, "width")), "<", " ")
  local lines = c.lines(v .. "\n", false)
  if #lines * #margin > c.memory() then fail("a result beyond the limit of memory") end
  for i = 2, #lines do
    if lines[i] ~= "" or flag(blank) then lines[i] = margin .. lines[i] end
  end
  return (flag(first) and margin or "") .. concat(lines, "\n")
end)

filter("truncate", { "length", "killwords", "end", "leeway" }, function(v, wanted, kill, tail, leeway)
  wanted, leeway = or_default(wanted, 255, "length"), or_default(leeway, 5, "leeway")
  tail = tail == nil and "..." or str(tail)
  if wanted < c.len(tail) then fail("expected length >= %d, got %d", c.len(tail), wanted) end
  if length(v) <= wanted + leeway then return v end
  if type(v) ~= "string" then fail("truncate: expected str, not %s", type_name(v)) end
  local cut = c.slice(v, 0, wanted - c.len(tail))
  if not flag(kill) then
    local space = c.find(cut, " ", 1, true)
    cut = space and cut:sub(1, space - 1) or cut
  end
  return cut .. tail
end)

filter("join", { "d", "attribute" }, function(v, separator, path)
  local items, n = items_of(v)
  local get = getter(path)
  separator = separator == nil and "" or str(separator)
  for i = 1, n do items[i] = str(get(items[i])) end
  if n * #separator > c.memory() then fail("a result beyond the limit of memory") end
  return concat(items, separator)
end)
filter("list", {}, function(v) return new_list((items_of(v))) end)
filter("first", {}, function(v)
  if type(v) == "table" and v.kind == "iter" and v.at <= #v.items then
    v.at = v.at + 1
    return v.items[v.at - 1]
  end
  local items, n = iter(v)
  if n == 0 then return undefined("No first item, sequence was empty.", true) end
  return items[1]
end)
filter("last", {}, function(v)
  if type(v) == "table" and v.kind == "iter" then fail("'generator' object is not reversible") end
  local items, n = iter(v)
  if n == 0 then return undefined("No last item, sequence was empty.", true) end
  return items[n]
end)
filter("reverse", {}, function(v)
  local items, n = items_of(v)
  for i = 1, n // 2 do items[i], items[n + 1 - i] = items[n + 1 - i], items[i] end
  if type(v) == "string" then return concat(items) end
  return new_iter(items)
end)
filter("items", {}, function(v)
  if is_undefined(v) then return new_iter({}) end
  if type(v) ~= "table" or v.kind ~= "dict" then fail("Can only get item pairs from a mapping.") end
  return new_iter(pairs_of(v))
end)
filter("sort", { "reverse", "case_sensitive", "attribute" }, function(v, reverse, exact, path)
  local paths = type(path) == "string" and split(path, ",", -1) or { path }
  local getters = {}
  for i = 1, math.max(1, #paths) do getters[i] = getter(paths[i]) end
  return sort_by(items_of(v), function(one)
    local keys = { kind = "list" }
    for i, get in ipairs(getters) do
      local key = get(one)
      keys[i] = flag(exact) and key or folded(key)
    end
    return keys
  end, flag(reverse))
end)
filter("dictsort", { "case_sensitive", "by", "reverse" }, function(v, exact, by, reverse)
  if is_undefined(v) then fail_undefined(v) end
  if type(v) ~= "table" or v.kind ~= "dict" then fail("dictsort: expected a mapping, not %s", type_name(v)) end
  local place = (by == nil or by == "key") and 1 or by == "value" and 2
  if not place then fail('You can only sort by either "key" or "value"') end
  return sort_by(pairs_of(v), function(pair)
    return flag(exact) and pair[place] or folded(pair[place])
  end, flag(reverse))
end)
filter("unique", { "case_sensitive", "attribute" }, function(v, exact, path)
  local get, seen, result = getter(path), {}, {}
  local items, n = iter(v)
  for i = 1, n do
    local key = get(items[i])
    local h = hash(flag(exact) and key or folded(key))
    if not seen[h] then
      seen[h] = true
      result[#result + 1] = items[i]
    end
  end
  return new_iter(result)
end)
filter("groupby", { "attribute", "default", "case_sensitive" }, function(v, path, default, exact)
  local get = getter(path, default)
  local function key_of(one)
    local key = get(one)
    return flag(exact) and key or folded(key)
  end
  local result, group, current = {}, nil, nil
  for _, one in ipairs(sort_by(items_of(v), key_of, false)) do
    local key = key_of(one)
    if group == nil or not eq(key, current) then
      group, current = new_list({}), key
      result[#result + 1] = new_list({ get(one), group }, "tuple")
    end
    group[#group + 1] = one
  end
  return new_list(result)
end)
local function extreme(name, better)
  filter(name, { "case_sensitive", "attribute" }, function(v, exact, path)
    local items, n = iter(v)
    if n == 0 then return undefined("No aggregated item, sequence was empty.", true) end
    local get, best, best_key = getter(path), nil, nil
    for i = 1, n do
      local key = get(items[i])
      if not flag(exact) then key = folded(key) end
      if i == 1 or better(key, best_key) then best, best_key = items[i], key end
    end
    return best
  end)
end
extreme("min", M.lt)
extreme("max", M.gt)
filter("sum", { "attribute", "start" }, function(v, path, start)
  local items, n = iter(v)
  local get, total = getter(path), start == nil and 0 or start
  for i = 1, n do total = add(total, get(items[i])) end
  return total
end)

local function batched(v, size, fill)
  size = to_integer(size, "linecount")
  local items, n = iter(v)
  local result = {}
  for i = 1, n do
    if #result == 0 or #result[#result] == size then result[#result + 1] = new_list({}) end
    local row = result[#result]
    row[#row + 1] = items[i]
  end
  local last = result[#result]
  if last and given(fill) then
    if size > MAX_RANGE then fail("batch: rows that are too long") end
    while #last < size do last[#last + 1] = fill end
  end
  return new_iter(result)
end
filter("batch", { "linecount", "fill_with" }, batched)
filter("slice", { "slices", "fill_with" }, function(v, slices, fill)
  slices = to_integer(slices, "slices")
  if slices <= 0 then fail("integer division or modulo by zero") end
  if slices > MAX_RANGE then fail("slice: too many") end
  local items, n = iter(v)
  local result, at = {}, 1
  for i = 0, slices - 1 do
    local count = n // slices + (i < n % slices and 1 or 0)
    local row = new_list(table.move(items, at, at + count - 1, 1, {}))
    if given(fill) and i >= n % slices then row[#row + 1] = fill end
    result[#result + 1], at = row, at + count
  end
  return new_iter(result)
end)

-- Text as Python's float() and int() read it, or nil.
local function parse_float(s)
  s = c.strip(s, nil, 3)
  local text = s:gsub("(%d)_(%d)", "%1%2"):gsub("(%d)_(%d)", "%1%2")
  local sign, word = text:lower():match("^([-+]?)(%a+)$")
  if word == "inf" or word == "infinity" then return sign == "-" and -math.huge or math.huge end
  if word == "nan" then return 0 / 0 end
  if not text:find("^[-+]?[%d%.]") or text:find("[xXpP]") then return end
  local value = tonumber((text:gsub("^%+", "")))
  return value and value + 0.0
end

local function parse_int(s, base)
  s = c.strip(s, nil, 3):lower()
  local sign, digits = s:match("^([-+]?)(.*)$")
  local prefix = ({ [16] = "^0x", [8] = "^0o", [2] = "^0b" })[base]
  if prefix then digits = digits:gsub(prefix, "") end
  if not digits:find("^%w[%w_]*$") or digits:find("__", 1, true) or digits:sub(-1) == "_" then return end
  digits = digits:gsub("_", "")
  local value = 0
  for i = 1, #digits do
    local digit = tonumber(digits:sub(i, i), 36)
    if not digit or digit >= base then return end
    value = add(multiply(value, base), digit)
  end
  return sign == "-" and -value or value
end

local function truncated(x)
  if nan(x) or x == math.huge or x == -math.huge then return end
  return math.tointeger(x < 0 and math.ceil(x) or floor(x)) or too_large()
end

filter("int", { "default", "base" }, function(v, default, base)
  if default == nil then default = 0 end
  base = or_default(base, 10, "base")
  if base < 2 or base > 36 then fail("int() base must be >= 2 and <= 36, or 0") end
  if is_undefined(v) then fail_undefined(v) end
  local x = number(v)
  if type(v) == "string" then
    local value = parse_int(v, base)
    if value then return value end
    x = parse_float(v)
  end
  local value = x and truncated(x)
  if value then return value end
  return default
end)
filter("float", { "default" }, function(v, default)
  if is_undefined(v) then fail_undefined(v) end
  local x = number(v) or type(v) == "string" and parse_float(v)
  if x then return x + 0.0 end
  if default == nil then return 0.0 end
  return default
end)
filter("abs", {}, function(v)
  local x = number(v)
  if not x then
    check_defined(v)
    fail("bad operand type for abs(): '%s'", type_name(v))
  end
  return x < 0 and M.neg(x) or x
end)
filter("round", { "precision", "method" }, function(v, precision, how)
  local x = number(v)
  precision = or_default(precision, 0, "precision")
  if how ~= nil and how ~= "common" and how ~= "ceil" and how ~= "floor" then
    fail("method must be common, ceil or floor")
  end
  if not x then
    check_defined(v)
    fail("type %s doesn't define __round__ method", type_name(v))
  end
  if precision > 300 or precision < -300 then fail("round: a precision that is too large") end
  if how == "ceil" or how == "floor" then
    local scale = 10.0 ^ precision
    local scaled = x * scale
    return (how == "ceil" and -((-scaled) // 1) or scaled // 1) / scale
  end
  if mtype(x) == "integer" then
    if precision >= 0 then return x end
    if precision < -18 then return 0 end
    local scale = math.tointeger(10 ^ -precision)
    local low = x // scale * scale
    local twice = 2 * (x - low)
    if twice > scale or twice == scale and low // scale % 2 == 1 then low = low + scale end
    return low
  end
  if nan(x) or x == math.huge or x == -math.huge then return x end
  if precision >= 0 then return tonumber(c.fixed(x, precision)) + 0.0 end
  local scale = 10.0 ^ -precision
  return tonumber(c.fixed(x / scale, 0)) * scale
end)

local function named_filter(name)
  local f = type(name) == "string" and F[name]
  if not f then fail("No filter named %s.", repr(name)) end
  return f
end

-- map and select look at a value only if it is true, so that none is as good as an empty list.
local function iter_if_true(v)
  if truth(v) then return iter(v) end
  return {}, 0
end

function F.map(v, named, ...)
  local items, n = iter_if_true(v)
  local result, f = {}, nil
  local args = { ... }
  if #args == 0 and named and named.attribute ~= nil then
    for _, key in ipairs(named) do
      if key ~= "attribute" and key ~= "default" then fail("Unexpected keyword argument %s", c.repr(key)) end
    end
    f = getter(named.attribute, named.default)
  elseif #args == 0 then
    if n > 0 then fail("map requires a filter argument") end
  else
    local one = named_filter(args[1])
    f = function(each) return one(each, named, table.unpack(args, 2)) end
  end
  for i = 1, n do result[i] = f(items[i]) end
  return new_iter(result)
end

local function named_test(name)
  local f = type(name) == "string" and M.tests[name]
  if not f then fail("No test named %s.", repr(name)) end
  return f
end

local function selecting(name, wanted, by_attribute)
  F[name] = function(v, named, ...)
    local items, n = iter_if_true(v)
    local args, result, get = { ... }, {}, nil
    if by_attribute then
      if args[1] == nil then fail("Missing parameter for attribute name") end
      get = getter(table.remove(args, 1))
    end
    local test = args[1] ~= nil and n > 0 and named_test(args[1])
    for i = 1, n do
      local value = items[i]
      if get then value = get(value) end
      local good
      if test then good = test(value, named, table.unpack(args, 2)) else good = truth(value) end
      if good == wanted then result[#result + 1] = items[i] end
    end
    return new_iter(result)
  end
end
selecting("select", true, false)
selecting("reject", false, false)
selecting("selectattr", true, true)
selecting("rejectattr", false, true)

filter("attr", { "name" }, function(v, name)
  local value = attribute(v, str(name))
  if value == nil then return no_element(v, str(name)) end
  return value
end)

---------------------------------------------------------------------------------------------------- tests

local T = M.tests
local function test(name, names, f) T[name] = takes(name, names, f) end
local function kind_test(name, f) T[name] = takes(name, {}, f) end

local function is_kind(...)
  local kinds = {}
  for _, kind in ipairs({ ... }) do kinds[kind] = true end
  return function(v) return type(v) == "table" and kinds[v.kind] == true end
end

kind_test("defined", function(v) return not is_undefined(v) end)
kind_test("undefined", is_undefined)
kind_test("none", function(v) return v == none end)
kind_test("boolean", function(v) return type(v) == "boolean" end)
kind_test("true", function(v) return v == true end)
kind_test("false", function(v) return v == false end)
kind_test("integer", function(v) return mtype(v) == "integer" end)
kind_test("float", function(v) return mtype(v) == "float" end)
kind_test("number", function(v) return number(v) ~= nil end)
kind_test("string", function(v) return type(v) == "string" end)
kind_test("mapping", is_kind("dict"))
kind_test("callable", function(v) return type(v) == "function" end)
local has_items = is_kind("list", "tuple", "dict", "view", "iter", "undefined", "loop")
kind_test("iterable", function(v) return type(v) == "string" or has_items(v) end)
-- Python asks for len() and for [ ]; Undefined has both.
local is_indexed = is_kind("list", "tuple", "dict", "undefined")
kind_test("sequence", function(v) return type(v) == "string" or is_indexed(v) end)
kind_test("lower", function(v) return c.is(str(v), "islower") end)
kind_test("upper", function(v) return c.is(str(v), "isupper") end)
kind_test("escaped", function() return false end)
kind_test("odd", function(v) return M.mod(v, 2) == 1 end)
kind_test("even", function(v) return M.mod(v, 2) == 0 end)
kind_test("filter", function(v) return type(v) == "string" and F[v] ~= nil end)
kind_test("test", function(v) return type(v) == "string" and T[v] ~= nil end)

local function two(name, f)
  test(name, { "other" }, function(v, other)
    if other == nil then fail("test '%s' needs an argument", name) end
    return f(v, other)
  end)
end
two("divisibleby", function(v, n) return M.mod(v, n) == 0 end)
two("sameas", function(v, other) return rawequal(v, other) and mtype(v) == mtype(other) end)
two("in", contains)
for name, f in pairs({
  ["=="] = eq, eq = eq, equalto = eq, ["!="] = M.ne, ne = M.ne, [">"] = M.gt, gt = M.gt, greaterthan = M.gt,
  ge = M.ge, [">="] = M.ge, ["<"] = M.lt, lt = M.lt, lessthan = M.lt, ["<="] = M.le, le = M.le,
}) do two(name, f) end

---------------------------------------------------------------------------------------------------- functions

local function new_namespace(named, ...)
  local ns = { kind = "namespace", vars = {} }
  for i = 1, select("#", ...) do
    local from = select(i, ...)
    if type(from) ~= "table" or from.kind ~= "dict" then
      fail("namespace: expected a mapping, not %s", type_name(from))
    end
    for j, key in ipairs(from.keys) do ns.vars[str(key)] = from.vals[j] end
  end
  for _, key in ipairs(named or {}) do ns.vars[key] = named[key] end
  return ns
end

local function range(_, ...)
  local n = select("#", ...)
  if n == 0 or n > 3 then fail("range expected 1 to 3 arguments, got %d", n) end
  local args = { ... }
  for i = 1, n do args[i] = to_integer(args[i], "a bound of range") end
  local from, to, step = n > 1 and args[1] or 0, n > 1 and args[2] or args[1], args[3] or 1
  if step == 0 then fail("range() arg 3 must not be zero") end
  local count = step > 0 and (to - from + step - 1) // step or (from - to - step - 1) // -step
  if count > MAX_RANGE then fail("Range too big. The sandbox blocks ranges larger than MAX_RANGE (%d).", MAX_RANGE) end
  local list = {}
  for i = 1, count do list[i] = from + (i - 1) * step end
  return new_list(list)
end

local function make_dict(named, from)
  local d = new_dict()
  if type(from) == "table" and from.kind == "dict" then
    for i, key in ipairs(from.keys) do dict_set(d, key, from.vals[i]) end
  elseif from ~= nil then
    local items, n = iter(from)
    for i = 1, n do
      local pair = M.unpack(items[i], 2)
      dict_set(d, pair[1], pair[2])
    end
  end
  for _, key in ipairs(named or {}) do dict_set(d, key, named[key]) end
  return d
end

-- An object with a method or two, as the namespace that it looks like.
local function cycler(_, ...)
  local items, at = { ... }, 1
  if #items == 0 then fail("at least one item has to be provided") end
  local self = new_namespace()
  self.vars.current = items[1]
  self.vars.next = function()
    local one = items[at]
    at = at % #items + 1
    self.vars.current = items[at]
    return one
  end
  self.vars.reset = function()
    at, self.vars.current = 1, items[1]
    return none
  end
  return self
end

local function joiner(named, separator)
  separator = separator or named and named.sep or ", "
  local used = false
  return function()
    if used then return separator end
    used = true
    return ""
  end
end

globals = {
  range = range, dict = make_dict, namespace = new_namespace, cycler = cycler, joiner = joiner,
  raise_exception = function(named, message)
    if message == nil and named then message = named.message end
    fail("%s", message == nil and "raise_exception" or str(message))
  end,
  strftime_now = function(named, format_text)
    return c.strftime(need_string(format_text or named and named.format or none, "strftime_now"))
  end,
}

variables = {
  __index = function(_, name)
    local value = globals[name]
    if value ~= nil then return value end
    return undefined(name)
  end,
}

--- Runs a template: the function that its chunk gave, and the table of its variables.  Gives the list of pieces.
function M.run(f, vars)
  calls, level = 0, 0
  return f(setmetatable(vars, variables))
end

return M
