--- Jinja to Lua: the compiler of chat templates.
--
-- compile(source) gives the text of a Lua chunk, or raises { message =, line = }.  The environment is the one that chat
-- templates are written for (transformers'): trim_blocks and lstrip_blocks on, loop controls, generation blocks.
--
-- * A line of the chunk is the same line of the template: whoever catches an error finds the template's line in Lua's
--   own debug information, and it costs nothing to keep.
-- * The chunk names no globals.  Every operation on a value is a function of jinja_lib.lua, which it gets as locals.
-- * Variables live in one table per scope (R is the template's).  A scope that may set a name copies the outer value
--   when it is entered, so every reference is resolved here, and nothing that is set leaks out.

local c, lib = ...

local M = {}

-- Lua's own compiler counts levels and local variables; these stay below what it takes.
local MAX_NESTING <const> = 120
local MAX_SCOPES <const> = 20
-- Operands of one + or ~ that are handed to one call.
local MAX_OPERANDS <const> = 40

-- What the chunk uses of the library, as locals.
local IMPORTS <const> = {
  "add", "addn", "sub", "mul", "div", "floordiv", "mod", "pow", "neg", "pos", "cat", "eq", "ne", "lt", "le", "gt", "ge",
  "contains", "chain", "truth", "pick", "unless", "unbox", "box", "field", "getattr", "getitem", "slice", "call",
  "callm", "spread",
  "iter", "unpack", "loop", "setns", "dict", "macro", "out", "concat", "none", "undefined", "filters",
  "tests", "missing",
}

local function fail(line, fmt, ...)
  error({ message = select("#", ...) > 0 and fmt:format(...) or fmt, line = line }, 0)
end

---------------------------------------------------------------------------------------------------- text to tokens

local OPERATORS <const> = {
  ["//"] = true, ["**"] = true, ["=="] = true, ["!="] = true, [">="] = true, ["<="] = true, ["+"] = true, ["-"] = true,
  ["/"] = true, ["*"] = true, ["%"] = true, ["~"] = true, ["["] = true, ["]"] = true, ["("] = true, [")"] = true,
  ["{"] = true, ["}"] = true, [">"] = true, ["<"] = true, ["="] = true, ["."] = true, [":"] = true, ["|"] = true,
  [","] = true, [";"] = true,
}
local CLOSES <const> = { ["("] = ")", ["["] = "]", ["{"] = "}" }
local ESCAPES <const> = {
  n = "\n", t = "\t", r = "\r", a = "\a", b = "\b", f = "\f", v = "\v", ["\\"] = "\\", ["'"] = "'", ['"'] = '"',
  ["\n"] = "",
}
local HEX_DIGITS <const> = { x = 2, u = 4, U = 8 }

--- The value of a string literal, as Python's unicode-escape reads it.
local function unescape(text, line)
  if not text:find("\\", 1, true) then return text end
  local parts, i = {}, 1
  while true do
    local at = text:find("\\", i, true)
    if not at then break end
    parts[#parts + 1] = text:sub(i, at - 1)
    local kind = text:sub(at + 1, at + 1)
    local octal = text:match("^[0-7][0-7]?[0-7]?", at + 1)
    if ESCAPES[kind] then
      parts[#parts + 1] = ESCAPES[kind]
      i = at + 2
    elseif octal then
      parts[#parts + 1] = utf8.char(tonumber(octal, 8))
      i = at + 1 + #octal
    elseif HEX_DIGITS[kind] then
      local digits = text:sub(at + 2, at + 1 + HEX_DIGITS[kind])
      if #digits ~= HEX_DIGITS[kind] or digits:find("%X") then fail(line, "truncated \\%s escape in a string", kind) end
      local code = tonumber(digits, 16)
      if code > 0x10ffff or code >= 0xd800 and code < 0xe000 then
        fail(line, "\\%s%s is not a character", kind, digits)
      end
      parts[#parts + 1] = utf8.char(code)
      i = at + 2 + #digits
    elseif kind == "N" then
      fail(line, "\\N escapes are not supported")
    else
      parts[#parts + 1] = "\\" .. kind
      i = at + 2
    end
  end
  parts[#parts + 1] = text:sub(i)
  return table.concat(parts)
end

--- A number at the start of what follows pos: its text and value, or nil.
local function number_at(src, pos, line)
  local mantissa = src:match("^%d[%d_]*", pos)
  if not mantissa then return end
  if src:sub(pos - 1, pos - 1) ~= "." then
    local fraction = src:match("^%.%d[%d_]*", pos + #mantissa) or ""
    local exponent = src:match("^[eE][+-]?%d[%d_]*", pos + #mantissa + #fraction) or ""
    local text = mantissa .. fraction .. exponent
    if #text > #mantissa then return text, tonumber((text:gsub("_", ""))) + 0.0 end
  end
  local text = src:match("^0[xX][%x_]+", pos)
  if text then return text, tonumber((text:sub(3):gsub("_", "")), 16) end
  text = src:match("^0[oO][0-7_]+", pos)
  if text then return text, tonumber((text:sub(3):gsub("_", "")), 8) end
  text = src:match("^0[bB][01_]+", pos)
  if text then return text, tonumber((text:sub(3):gsub("_", "")), 2) end
  text = mantissa:match("^0[0_]*") or mantissa
  local value = math.tointeger(tonumber((text:gsub("_", ""))))
  if not value then fail(line, "the integer %s does not fit 64 bits", text) end
  return text, value
end

--- Adds the tokens of src, { kind, value, line }, the last of kind "eof".
local function lex(src, tokens)
  src = src:gsub("\r\n?", "\n")
  if src:sub(-1) == "\n" then src = src:sub(1, -2) end
  local pos, line = 1, 1
  local newline = src:find("\n", 1, true) or math.huge -- the one that ends `line`

  local function here(at) -- the line of a position that never goes back
    while newline < at do
      line, newline = line + 1, src:find("\n", newline + 1, true) or math.huge
    end
    return line
  end

  local function push(kind, value, at) tokens[#tokens + 1] = { kind = kind, value = value, line = here(at or pos) } end

  -- The text before a tag that opens at `open` with this sign ("-", "+" or "").
  local function text_before(open, sign, is_block)
    local text = src:sub(pos, open - 1)
    if sign == "-" then
      text = c.strip(text, nil, 2)
    elseif sign ~= "+" and is_block then
      local start = text:match(".*\n()") or 1
      local line_starts = start > 1 or pos == 1 or src:byte(pos - 1) == 10
      if line_starts and start <= #text and c.spaces(text, start) > #text then text = text:sub(1, start - 1) end
    end
    if text ~= "" then push("data", text) end
  end

  local function after_block(at, sign) -- the position after "%}" or "#}" that ends at `at`
    if sign == "-" then return c.spaces(src, at) end
    if sign ~= "+" and src:byte(at) == 10 then return at + 1 end
    return at
  end

  local function string_literal(quote)
    local i = pos + 1
    while true do
      local at = src:find("[\\" .. quote .. "]", i)
      if not at then fail(here(pos), "a string that does not end") end
      if src:sub(at, at) == quote then
        push("string", unescape(src:sub(pos + 1, at - 1), here(pos)))
        pos = at + 1
        return
      end
      i = at + 2
    end
  end

  local function tag(kind)
    local open = {}
    while pos <= #src do
      if #open == 0 then
        local sign, rest
        if kind == "variable" then
          sign, rest = src:match("^(%-?)}}()", pos)
          if rest and sign == "-" then rest = c.spaces(src, rest) end
        else
          sign, rest = src:match("^([-+]?)%%}()", pos)
          rest = rest and after_block(rest, sign)
        end
        if rest then
          push(kind .. "_end")
          pos = rest
          return
        end
      end
      local blank = c.spaces(src, pos)
      local text, value = number_at(src, pos, here(pos))
      local name = src:match("^[%a_\x80-\xff][%w_\x80-\xff]*", pos)
      local char, pair = src:sub(pos, pos), src:sub(pos, pos + 1)
      if blank > pos then
        pos = blank
      elseif text then
        push("number", value)
        pos = pos + #text
      elseif name then
        push("name", name)
        pos = pos + #name
      elseif char == "'" or char == '"' then
        string_literal(char)
      elseif OPERATORS[pair] or OPERATORS[char] then
        local operator = OPERATORS[pair] and pair or char
        if CLOSES[operator] then
          open[#open + 1] = CLOSES[operator]
        elseif operator == ")" or operator == "]" or operator == "}" then
          local expected = table.remove(open)
          if not expected then fail(here(pos), "unexpected '%s'", operator) end
          if expected ~= operator then fail(here(pos), "unexpected '%s', expected '%s'", operator, expected) end
        end
        push(operator)
        pos = pos + #operator
      else
        fail(here(pos), "unexpected char '%s'", src:match(utf8.charpattern, pos))
      end
    end
  end

  while pos <= #src do
    local open, _, what = src:find("{([%%{#])", pos)
    if not open then
      push("data", src:sub(pos))
      break
    end
    local sign = src:match("^[-+]", open + 2) or ""
    local raw_sign, raw = src:match("^%s*raw%s*(%-?)%%}()", open + 2 + #sign)
    text_before(open, sign, what ~= "{")
    here(open)
    pos = open + 2 + #sign
    if what == "%" and raw then
      pos = raw_sign == "-" and c.spaces(src, raw) or raw
      local at, close_sign, end_sign, close = src:find("{%", pos, true), nil, nil, nil
      while at do
        close_sign, end_sign, close = src:match("^{%%([-+]?)%s*endraw%s*([-+]?)%%}()", at)
        if close then break end
        at = src:find("{%", at + 1, true)
      end
      if not at then fail(here(open), "Missing end of raw directive") end
      text_before(at, close_sign, true)
      pos = after_block(close, end_sign)
    elseif what == "#" then
      local close = src:find("#}", pos, true)
      if not close then fail(here(open), "Missing end of comment tag") end
      pos = after_block(close + 2, close > pos and src:match("^[-+]", close - 1) or "")
    else
      local kind = what == "{" and "variable" or "block"
      push(kind .. "_begin", nil, open)
      tag(kind)
    end
  end
  tokens[#tokens + 1] = { kind = "eof", line = #tokens > 0 and tokens[#tokens].line or 1 }
end

--- Requires: valid UTF-8.  Leaves: the tokens.  A mistake among them is a token of its kind, so that the first mistake
--- of the template is the one that is told.
local function tokens_of(src)
  local tokens = {}
  local good, why = pcall(lex, src, tokens)
  if not good then
    if type(why) ~= "table" then error(why, 0) end -- a limit
    tokens[#tokens + 1] = { kind = "mistake", line = why.line, message = why.message }
  end
  return tokens
end

---------------------------------------------------------------------------------------------------- tokens to a tree

local KIND_TEXT <const> = {
  block_begin = "begin of statement block", block_end = "end of statement block", data = "template data / text",
  variable_begin = "begin of print statement", variable_end = "end of print statement", eof = "end of template",
}
local CONSTANTS <const> = { ["true"] = true, True = true, ["false"] = false, False = false }
local COMPARE <const> = { ["=="] = "eq", ["!="] = "ne", ["<"] = "lt", ["<="] = "le", [">"] = "gt", [">="] = "ge" }
local NO_TEMPLATES <const> = { extends = true, include = true, import = true, from = true }
local TEST_ARGUMENT <const> = { name = true, string = true, number = true, ["("] = true, ["["] = true, ["{"] = true }
local NO_ARGUMENT <const> = { ["else"] = true, ["or"] = true, ["and"] = true }

local function describe(token) return token.kind == "name" and token.value or KIND_TEXT[token.kind] or token.kind end

--- Requires: tokens.  Leaves: the list of statements.  A node is { t = kind, line =, ... }.
local function parse(tokens)
  local index, tok, depth = 1, tokens[1], 0
  local open_tags = {} -- names and lines of the blocks that are open, and what ends them
  local used = {} -- names that are read here; one table for each loop body and macro
  local expression, statements, primary, postfix, tuple, unary

  local function good(token)
    if token.kind == "mistake" then fail(token.line, "%s", token.message) end
    return token
  end
  good(tok)

  local function look() return good(tokens[index + 1] or tokens[#tokens]) end
  local function advance()
    local token = tok
    tok = look()
    index = index + 1
    return token
  end
  local function is_name(name) return tok.kind == "name" and tok.value == name end
  local function skip(kind) return tok.kind == kind and advance() end
  local function skip_name(name) return is_name(name) and advance() end

  local function expect(kind, what)
    if tok.kind ~= kind then
      fail(tok.line, "expected token '%s', got '%s'", what or KIND_TEXT[kind] or kind, describe(tok))
    end
    return advance()
  end
  local function expect_name(name)
    if not is_name(name) then fail(tok.line, "expected token '%s', got '%s'", name, describe(tok)) end
    return advance()
  end

  local function deeper(line)
    depth = depth + 1
    if depth > MAX_NESTING then fail(line, "nested too deeply") end
  end

  local function call_args()
    local line = expect("(").line
    local args, kwargs, star, stars = {}, {}, nil, nil
    local comma = false
    while tok.kind ~= ")" do
      if comma then
        expect(",")
        if tok.kind == ")" then break end
      end
      if tok.kind == "*" then
        if star or stars then fail(line, "invalid syntax for function call expression") end
        advance()
        star = expression()
      elseif tok.kind == "**" then
        if stars then fail(line, "invalid syntax for function call expression") end
        advance()
        stars = expression()
      elseif tok.kind == "name" and look().kind == "=" then
        if stars then fail(line, "invalid syntax for function call expression") end
        local name = advance().value
        advance()
        kwargs[#kwargs + 1] = { name = name, value = expression() }
      else
        if star or stars or #kwargs > 0 then fail(line, "invalid syntax for function call expression") end
        args[#args + 1] = expression()
      end
      comma = true
    end
    expect(")")
    return { args = args, kwargs = kwargs, star = star, stars = stars }
  end

  local function dotted_name()
    local name = expect("name", "name").value
    while skip(".") do name = name .. "." .. expect("name", "name").value end
    return name
  end

  local function filter(node)
    local line = tok.line
    local name = dotted_name()
    local args = tok.kind == "(" and call_args() or { args = {}, kwargs = {} }
    return { t = "Filter", line = line, node = node, name = name, call = args }
  end

  local function test(node)
    local line = advance().line
    local negated = skip_name("not")
    local name = dotted_name()
    local args = { args = {}, kwargs = {} }
    if tok.kind == "(" then
      args = call_args()
    elseif TEST_ARGUMENT[tok.kind] and not (tok.kind == "name" and NO_ARGUMENT[tok.value]) then
      if is_name("is") then fail(tok.line, "You cannot chain multiple tests with is") end
      args.args[1] = postfix(primary())
    end
    local result = { t = "Test", line = line, node = node, name = name, call = args }
    return negated and { t = "Not", line = line, node = result } or result
  end

  local function subscribed()
    local line, from, to, step = tok.line, nil, nil, nil
    if tok.kind ~= ":" then
      from = expression()
      if tok.kind ~= ":" then return from end
    end
    advance()
    if tok.kind ~= ":" and tok.kind ~= "]" and tok.kind ~= "," then to = expression() end
    if skip(":") and tok.kind ~= "]" and tok.kind ~= "," then step = expression() end
    return { t = "Slice", line = line, from = from, to = to, step = step }
  end

  local function subscript(node)
    local token = advance()
    if token.kind == "." then
      local attribute = advance()
      if attribute.kind == "name" then
        return { t = "Getattr", line = token.line, node = node, name = attribute.value }
      end
      if attribute.kind ~= "number" or math.type(attribute.value) ~= "integer" then
        fail(attribute.line, "expected name or number")
      end
      local key = { t = "Const", line = attribute.line, value = attribute.value }
      return { t = "Getitem", line = token.line, node = node, key = key }
    end
    local keys = {}
    while tok.kind ~= "]" do
      if #keys > 0 then expect(",") end
      keys[#keys + 1] = subscribed()
    end
    expect("]")
    local key = #keys == 1 and keys[1] or { t = "Tuple", line = token.line, items = keys }
    return { t = "Getitem", line = token.line, node = node, key = key }
  end

  function postfix(node)
    while true do
      if tok.kind == "." or tok.kind == "[" then
        node = subscript(node)
      elseif tok.kind == "(" then
        local line = tok.line
        node = { t = "Call", line = line, node = node, call = call_args() }
      else
        return node
      end
    end
  end

  local function filters_after(node)
    while true do
      if skip("|") then
        node = filter(node)
      elseif is_name("is") then
        node = test(node)
      elseif tok.kind == "(" then
        local line = tok.line
        node = { t = "Call", line = line, node = node, call = call_args() }
      else
        return node
      end
    end
  end

  local function sequence(close, kind)
    local line, items = advance().line, {}
    while tok.kind ~= close do
      if #items > 0 then expect(",") end
      if tok.kind == close then break end
      local item = expression()
      items[#items + 1] = item
      if kind == "Dict" then
        expect(":")
        items[#items + 1] = expression()
      end
    end
    expect(close)
    return { t = kind, line = line, items = items }
  end

  function primary(with_namespace)
    local token = tok
    if token.kind == "name" then
      advance()
      local name = token.value
      if CONSTANTS[name] ~= nil then return { t = "Const", line = token.line, value = CONSTANTS[name] } end
      if name == "none" or name == "None" then return { t = "None", line = token.line } end
      used[name] = true
      if with_namespace and skip(".") then
        return { t = "NSRef", line = token.line, name = name, attribute = expect("name", "name").value }
      end
      return { t = "Name", line = token.line, name = name }
    elseif token.kind == "string" then
      local parts = {}
      while tok.kind == "string" do parts[#parts + 1] = advance().value end
      return { t = "Const", line = token.line, value = table.concat(parts) }
    elseif token.kind == "number" then
      advance()
      return { t = "Const", line = token.line, value = token.value }
    elseif token.kind == "(" then
      advance()
      local node = tuple({ parenthesised = true })
      expect(")")
      return node
    elseif token.kind == "[" then
      return sequence("]", "List")
    elseif token.kind == "{" then
      return sequence("}", "Dict")
    end
    fail(token.line, "unexpected '%s'", describe(token))
  end

  function unary(without_filter)
    deeper(tok.line)
    local token = tok
    local node
    if skip("-") then
      node = { t = "Unary", line = token.line, op = "neg", node = unary(true) }
    elseif skip("+") then
      node = { t = "Unary", line = token.line, op = "pos", node = unary(true) }
    else
      node = primary()
    end
    node = postfix(node)
    if not without_filter then node = filters_after(node) end
    depth = depth - 1
    return node
  end

  -- One level of left-associative operators: { token = name of the library's function }.
  local function level(operators, next_level)
    return function()
      local left = next_level()
      while operators[tok.kind] do
        local token = advance()
        left = { t = "Binary", line = token.line, op = operators[token.kind], left = left, right = next_level() }
      end
      return left
    end
  end

  local power = level({ ["**"] = "pow" }, function() return unary() end)
  local product = level({ ["*"] = "mul", ["/"] = "div", ["//"] = "floordiv", ["%"] = "mod" }, power)

  local function concat()
    local first = product()
    if tok.kind ~= "~" then return first end
    local node = { t = "Concat", line = first.line, items = { first } }
    while skip("~") do node.items[#node.items + 1] = product() end
    return node
  end

  local sum = level({ ["+"] = "add", ["-"] = "sub" }, concat)

  local function compare()
    local first = sum()
    local node = { t = "Compare", line = first.line, first = first, ops = {} }
    while true do
      local op
      if COMPARE[tok.kind] then
        op = COMPARE[advance().kind]
      elseif skip_name("in") then
        op = "in"
      elseif is_name("not") and look().kind == "name" and look().value == "in" then
        advance()
        advance()
        op = "notin"
      else
        return #node.ops > 0 and node or first
      end
      node.ops[#node.ops + 1] = { op = op, node = sum() }
    end
  end

  local function negation()
    if not is_name("not") then return compare() end
    deeper(tok.line)
    local line = advance().line
    local node = { t = "Not", line = line, node = negation() }
    depth = depth - 1
    return node
  end

  local function logical(name, kind, next_level)
    return function()
      local first = next_level()
      if not is_name(name) then return first end
      local node = { t = kind, line = first.line, items = { first } }
      while skip_name(name) do node.items[#node.items + 1] = next_level() end
      return node
    end
  end
  local disjunction = logical("or", "Or", logical("and", "And", negation))

  function expression(without_condition)
    deeper(tok.line)
    local node = disjunction()
    while not without_condition and skip_name("if") do
      local condition = disjunction()
      local otherwise = skip_name("else") and expression() or nil
      node = { t = "CondExpr", line = node.line, test = condition, yes = node, no = otherwise }
    end
    depth = depth - 1
    return node
  end

  -- options: parenthesised, targets (names and literals only), namespaces, without_condition, stop (a name that ends
  -- it)
  function tuple(options)
    options = options or {}
    local line, items, is_tuple = tok.line, {}, false
    while true do
      if #items > 0 then expect(",") end
      if tok.kind == "variable_end" or tok.kind == "block_end" or tok.kind == ")" then break end
      if options.stop and is_name(options.stop) then break end
      items[#items + 1] = options.targets and primary(options.namespaces) or expression(options.without_condition)
      if tok.kind ~= "," then break end
      is_tuple = true
    end
    if not is_tuple then
      if #items > 0 then return items[1] end
      if not options.parenthesised then fail(tok.line, "Expected an expression, got '%s'", describe(tok)) end
    end
    return { t = "Tuple", line = line, items = items }
  end

  local function check_target(node)
    if node.t == "Tuple" or node.t == "List" then
      for _, item in ipairs(node.items) do check_target(item) end
    elseif node.t ~= "Name" and node.t ~= "NSRef" then
      fail(node.line, "can't assign to '%s'", node.t:lower())
    end
    return node
  end

  local function target(options)
    options.targets = true
    local outer = used
    used = {} -- what is assigned is not read
    local node = check_target(tuple(options))
    used = outer
    if node.t == "NSRef" then used[node.name] = true end
    return node
  end

  local function target_name()
    local token = expect("name", "name")
    if CONSTANTS[token.value] ~= nil or token.value == "none" or token.value == "None" then
      fail(token.line, "can't assign to 'const'")
    end
    return token.value
  end

  local function signature()
    local params = {}
    expect("(")
    while tok.kind ~= ")" do
      if #params > 0 then expect(",") end
      local param = { line = tok.line, name = target_name() }
      if skip("=") then
        param.default = expression()
      elseif #params > 0 and params[#params].default then
        fail(tok.line, "non-default argument follows default argument")
      end
      params[#params + 1] = param
    end
    expect(")")
    return params
  end

  -- The statements up to one of these tags.  The tag's name is then the current token, or skipped with `drop`.
  local function body(ends, drop)
    skip(":")
    expect("block_end")
    open_tags[#open_tags].ends = ends
    local list = statements(ends)
    if drop then advance() end
    return list
  end

  -- A body whose names are counted apart; they count for the outside as well.
  local function apart(f)
    local outer, inner = used, {}
    used = inner
    local result = f()
    used = outer
    for name in pairs(inner) do outer[name] = true end
    return result, inner
  end

  local S = {}

  S["if"] = function(line)
    local node = { t = "If", line = line, branches = {} }
    repeat
      local branch = { line = tok.line, test = tuple({ without_condition = true }) }
      branch.body = body({ "elif", "else", "endif" })
      node.branches[#node.branches + 1] = branch
      local name = advance().value
      if name == "else" then node.otherwise = body({ "endif" }, true) end
    until name ~= "elif"
    return node
  end

  S["for"] = function(line)
    local node = { t = "For", line = line, target = target({ stop = "in" }) }
    expect_name("in")
    node.iter = tuple({ without_condition = true, stop = "recursive" })
    if skip_name("if") then node.test = expression() end
    if is_name("recursive") then fail(tok.line, "recursive loops are not supported") end
    local inner
    node.body, inner = apart(function() return body({ "endfor", "else" }) end)
    node.uses_loop = inner.loop
    if advance().value == "else" then node.otherwise = body({ "endfor" }, true) end
    return node
  end

  S["set"] = function(line)
    local node = { t = "Set", line = line, target = target({ namespaces = true }) }
    if skip("=") then
      node.value = tuple()
      return node
    end
    node.t = "SetBlock"
    local marker = { t = "Captured", line = line }
    node.filter = marker
    while skip("|") do node.filter = filter(node.filter) end
    node.body = body({ "endset" }, true)
    return node
  end

  S["macro"] = function(line)
    local node = { t = "Macro", line = line, name = target_name() }
    local _, inner = apart(function()
      node.params = signature()
      node.body = body({ "endmacro" }, true)
    end)
    node.used = inner
    return node
  end

  S["call"] = function(line)
    local node = { t = "CallBlock", line = line, name = "caller", params = {} }
    if tok.kind == "(" then node.params = signature() end
    node.node = expression()
    if node.node.t ~= "Call" then fail(line, "expected call") end
    local _, inner = apart(function() node.body = body({ "endcall" }, true) end)
    node.used = inner
    return node
  end

  S["filter"] = function(line)
    local node = { t = "FilterBlock", line = line }
    node.filter = filter({ t = "Captured", line = line })
    while skip("|") do node.filter = filter(node.filter) end
    node.body = body({ "endfilter" }, true)
    return node
  end

  S["with"] = function(line)
    local node = { t = "With", line = line, targets = {}, values = {} }
    while tok.kind ~= "block_end" do
      if #node.targets > 0 then expect(",") end
      node.targets[#node.targets + 1] = target({})
      expect("=")
      node.values[#node.values + 1] = expression()
    end
    node.body = body({ "endwith" }, true)
    return node
  end

  S["print"] = function(line)
    local list = {}
    while tok.kind ~= "block_end" do
      if #list > 0 then expect(",") end
      list[#list + 1] = { t = "Print", line = line, node = expression() }
    end
    return { t = "Statements", line = line, list = list }
  end

  S["do"] = function(line) return { t = "Do", line = line, node = tuple() } end
  S["break"] = function(line) return { t = "Break", line = line } end
  S["continue"] = function(line) return { t = "Continue", line = line } end

  -- Marks the assistant's part for training; here its contents only.
  S["generation"] = function(line) return { t = "Scope", line = line, body = body({ "endgeneration" }, true) } end

  S["block"] = function(line)
    local name = expect("name", "name").value
    while skip_name("scoped") or skip_name("required") do end
    local node = { t = "Scope", line = line, body = body({ "endblock" }, true) }
    skip_name(name)
    return node
  end

  S["autoescape"] = function(line)
    expression()
    return { t = "Scope", line = line, body = body({ "endautoescape" }, true) }
  end

  local function unknown_tag(name, line)
    local top = open_tags[#open_tags]
    local text = name and ("Encountered unknown tag '%s'."):format(name) or "Unexpected end of template."
    if top then
      local ends = {}
      for i, tag in ipairs(top.ends) do ends[i] = "'" .. tag .. "'" end
      text = ("%s Looking for %s: the '%s' of line %d is open."):format(text, table.concat(ends, " or "), top.name,
        top.line)
    end
    fail(line, "%s", text)
  end

  local function statement()
    if tok.kind ~= "name" then fail(tok.line, "tag name expected") end
    local name, line = tok.value, tok.line
    if NO_TEMPLATES[name] then fail(line, "'%s' is not possible: a chat template stands alone", name) end
    local f = S[name]
    if not f then unknown_tag(name, line) end
    advance()
    deeper(line)
    open_tags[#open_tags + 1] = { name = name, line = line, ends = {} }
    local node = f(line)
    open_tags[#open_tags] = nil
    depth = depth - 1
    return node
  end

  function statements(ends)
    local list = {}
    while tok.kind ~= "eof" do
      local line = tok.line
      if tok.kind == "data" then
        list[#list + 1] = { t = "Data", line = line, text = advance().value }
      elseif skip("variable_begin") then
        list[#list + 1] = { t = "Print", line = line, node = tuple() }
        expect("variable_end")
      else
        expect("block_begin")
        for _, name in ipairs(ends) do
          if is_name(name) then return list end
        end
        list[#list + 1] = statement()
        expect("block_end")
      end
    end
    if #ends > 0 then unknown_tag(nil, tok.line) end
    return list
  end

  return statements({})
end

---------------------------------------------------------------------------------------------------- a tree to Lua

local QUOTED <const> = { ["\n"] = "\\n", ["\\"] = "\\\\", ['"'] = '\\"' }

local function quoted(text)
  return '"' .. text:gsub('[%c"\\]', function(char) return QUOTED[char] or ("\\%03d"):format(char:byte()) end) .. '"'
end

--- The names that these statements set in their own scope.
local function stores(list, names)
  local function add(target)
    if target.t == "Name" then
      if not names[target.name] then
        names[target.name] = true
        names[#names + 1] = target.name
      end
    elseif target.items then
      for _, item in ipairs(target.items) do add(item) end
    end
  end
  for _, node in ipairs(list) do
    if node.t == "Set" or node.t == "SetBlock" then
      add(node.target)
    elseif node.t == "Macro" then
      add({ t = "Name", name = node.name })
    elseif node.t == "If" then
      for _, branch in ipairs(node.branches) do stores(branch.body, names) end
      stores(node.otherwise or {}, names)
    end
  end
  return names
end

--- Requires: statements.  Leaves: the text of the chunk, which takes the library and gives the function that renders.
local function emit(tree)
  local parts, line, ids, depth, soft = {}, 1, 0, 0, 0
  local scopes = {} -- innermost last: { name of the table, names that it holds }
  local buffers = { "o" }
  local loops = {} -- innermost last: { id, continues }; false where a macro begins
  local expr, cond, statement

  local function put(...)
    for i = 1, select("#", ...) do parts[#parts + 1] = (select(i, ...)) end
  end
  local function at(wanted)
    if wanted > line then
      parts[#parts + 1] = ("\n"):rep(wanted - line)
      line = wanted
    end
  end
  local function id()
    ids = ids + 1
    return ids
  end

  local function field(scope, name) return scope .. "[" .. quoted(name) .. "]" end
  local function ref(name, outside)
    for i = #scopes - (outside or 0), 1, -1 do
      if scopes[i].names[name] then return field(scopes[i].table, name) end
    end
    return field("R", name)
  end
  local function buffer() return buffers[#buffers] end

  -- Opens a scope that holds `params`, whose values the caller puts in, and copies of what `list` may set.
  local function open_scope(params, list, at_line)
    if #scopes >= MAX_SCOPES then fail(at_line, "nested too deeply") end
    local scope = { table = "s" .. id(), names = {}, soft = soft }
    soft = 0 -- as Jinja has it: a condition guards only what stands in its own scope
    for _, name in ipairs(params) do scope.names[name] = true end
    scopes[#scopes + 1] = scope
    local copies = stores(list, {})
    scope.enter = function()
      for _, name in ipairs(copies) do
        if not scope.names[name] then
          put(field(scope.table, name), " = ", ref(name, 1), " ")
          scope.names[name] = true
        end
      end
    end
    return scope
  end
  local function close_scope() soft = table.remove(scopes).soft end

  local function each(items, f)
    for i, item in ipairs(items) do
      if i > 1 then put(", ") end
      f(item)
    end
  end

  -- ", arguments" of a call as the library takes them: the table of named ones or nil, then the others.  `extra` puts
  -- one more named one.
  local function arguments(call, extra)
    if #call.kwargs > 0 or extra then
      put(", { ")
      for _, kwarg in ipairs(call.kwargs) do
        put(quoted(kwarg.name), ", [", quoted(kwarg.name), "] = ")
        expr(kwarg.value)
        put(", ")
      end
      if extra then
        put('"caller", caller = ')
        extra()
      end
      put(" }")
    else
      put(", nil")
    end
    for _, arg in ipairs(call.args) do
      put(", ")
      expr(arg)
    end
  end

  -- The same with * or **.
  local function spread(call, extra)
    put(", spread(")
    if call.star then expr(call.star) else put("nil") end
    put(", ")
    if call.stars then expr(call.stars) else put("nil") end
    arguments(call, extra)
    put(")")
  end

  local function all_arguments(call, extra)
    if call.star or call.stars then spread(call, extra) else arguments(call, extra) end
  end

  local E = {}

  function E.Const(node)
    local value = node.value
    if type(value) == "string" then
      put(quoted(value))
    elseif math.type(value) == "float" then
      put(value == math.huge and "(1/0)" or ("%a"):format(value))
    else
      put(tostring(value))
    end
  end

  function E.None() put("none") end
  function E.Captured() put("concat(", buffer(), ")") end
  function E.Name(node) put(ref(node.name)) end
  E.NSRef = E.Name

  function E.List(node)
    put('{ kind = "', node.t:lower(), '", ')
    each(node.items, expr)
    put(" }")
  end
  E.Tuple = E.List

  function E.Dict(node)
    put("dict({ ")
    each(node.items, expr)
    put(" })")
  end

  -- Most names are plain members of a dict; those that may mean something else take the longer way.
  function E.Getattr(node)
    put((lib.dict_names[node.name] or node.name:sub(1, 1) == "_") and "getattr(" or "field(")
    expr(node.node)
    put(", ", quoted(node.name), ")")
  end

  function E.Slice(node) fail(node.line, "a slice is only possible alone in the brackets") end

  function E.Getitem(node)
    local key = node.key
    put(key.t == "Slice" and "slice(" or "getitem(")
    expr(node.node)
    put(", ")
    if key.t == "Slice" then
      each({ key.from or false, key.to or false, key.step or false }, function(bound)
        if bound then expr(bound) else put("nil") end
      end)
    else
      expr(key)
    end
    put(")")
  end

  local function call(node, extra)
    local f = node.node
    if f.t == "Getattr" then
      put("callm(")
      expr(f.node)
      put(", ", quoted(f.name))
    else
      put("call(")
      expr(f)
    end
    all_arguments(node.call, extra)
    put(")")
  end
  function E.Call(node) call(node) end

  -- A name that the library does not know is refused now, or, where a condition guards it, when it is reached.
  local function library(kind, node)
    if not lib[kind .. "s"][node.name] then
      if soft == 0 then fail(node.line, "No %s named '%s'.", kind, node.name) end
      put("missing(", quoted(kind), ", ", quoted(node.name), ", ")
    else
      put(kind, "s[", quoted(node.name), "](")
    end
    expr(node.node)
    all_arguments(node.call)
    put(")")
  end
  function E.Filter(node) library("filter", node) end
  function E.Test(node) library("test", node) end

  function E.Unary(node)
    put(node.op, "(")
    expr(node.node)
    put(")")
  end

  -- a + b + c ... is one call: a long chain would nest too deeply for Lua's compiler.
  local function sum(node)
    local terms = {}
    while node.t == "Binary" and node.op == "add" and #terms < MAX_OPERANDS do
      table.insert(terms, 1, node.right)
      node = node.left
    end
    put(#terms == 1 and "add(" or "addn(")
    expr(node)
    for _, term in ipairs(terms) do
      put(", ")
      expr(term)
    end
    put(")")
  end

  function E.Binary(node)
    if node.op == "add" then return sum(node) end
    put(node.op, "(")
    expr(node.left)
    put(", ")
    expr(node.right)
    put(")")
  end

  function E.Concat(node)
    local items = node.items
    while #items > MAX_OPERANDS do
      local first = { t = "Concat", line = node.line, items = table.move(items, 1, MAX_OPERANDS, 1, {}) }
      items = table.move(items, MAX_OPERANDS + 1, #items, 2, { first })
    end
    put("cat(")
    each(items, expr)
    put(")")
  end

  local function is_string(node) return node.t == "Const" and type(node.value) == "string" end

  function E.Compare(node)
    local op, right = node.ops[1].op, node.ops[1].node
    if #node.ops > 1 then
      put("chain({ ")
      expr(node.first)
      for _, link in ipairs(node.ops) do
        put(', "', link.op, '", function() return ')
        expr(link.node)
        put(" end")
      end
      put(" })")
    elseif (op == "eq" or op == "ne") and (is_string(node.first) or is_string(right)) then
      put("(") -- nothing but a string equals a string
      expr(node.first)
      put(op == "eq" and " == " or " ~= ")
      expr(right)
      put(")")
    elseif op == "in" or op == "notin" then
      put(op == "in" and "contains(" or "(not contains(")
      expr(node.first)
      put(", ")
      expr(right)
      put(op == "in" and ")" or "))")
    else
      put(op, "(")
      expr(node.first)
      put(", ")
      expr(right)
      put(")")
    end
  end

  function E.Not(node)
    put("(not ")
    cond(node.node)
    put(")")
  end

  -- What is true for Python is true for Lua: pick() gives such a value, else nil.
  function E.Or(node)
    put("(")
    for i, item in ipairs(node.items) do
      put(i == 1 and "" or " or ", i < #node.items and "pick(" or "")
      expr(item)
      put(i < #node.items and ")" or "")
    end
    put(")")
  end

  -- unless() gives a value that is false for Python, else nil; false itself travels in a box.
  function E.And(node)
    put("unbox(")
    for i, item in ipairs(node.items) do
      put(i == 1 and "" or " or ", i < #node.items and "unless(" or "")
      expr(item)
      put(i < #node.items and ")" or "")
    end
    put(")")
  end

  function E.CondExpr(node)
    soft = soft + 1
    put("unbox(")
    cond(node.test)
    put(" and box(")
    expr(node.yes)
    put(") or ")
    if node.no then
      expr(node.no)
    else
      put('undefined("the inline if-expression on line ', tostring(node.line),
        ' evaluated to false and no else section was defined.", true)')
    end
    put(")")
    soft = soft - 1
  end

  local IS_BOOLEAN <const> = { Compare = true, Test = true, Not = true }

  local function nested(node, f)
    depth = depth + 1
    if depth > MAX_NESTING then fail(node.line, "nested too deeply") end
    at(node.line)
    f(node)
    depth = depth - 1
  end

  function expr(node) nested(node, E[node.t]) end

  --- The same as a Lua condition.
  function cond(node)
    if node.t == "And" or node.t == "Or" then
      nested(node, function()
        put("(")
        for i, item in ipairs(node.items) do
          if i > 1 then put(node.t == "And" and " and " or " or ") end
          cond(item)
        end
        put(")")
      end)
    elseif IS_BOOLEAN[node.t] then
      expr(node)
    else
      put("truth(")
      expr(node)
      put(")")
    end
  end

  -- Assigns the Lua expression `value` to names of the innermost scope, or to fields of namespaces.
  local function assign(target, value)
    if target.t == "Name" then
      local scope = scopes[#scopes]
      put(field(scope and scope.table or "R", target.name), " = ", value, " ")
    elseif target.t == "NSRef" then
      put("setns(", ref(target.name), ", ", quoted(target.attribute), ", ", value, ") ")
    else
      local list = "t" .. id()
      put("do local ", list, " = unpack(", value, ", ", tostring(#target.items), ") ")
      for i, item in ipairs(target.items) do assign(item, list .. "[" .. i .. "]") end
      put("end ")
    end
  end

  local function block(list)
    for _, node in ipairs(list) do statement(node) end
  end

  -- A new buffer for what `list` prints; `use` then may read it.
  local function capture(list, use)
    local name = "o" .. id()
    put("do local ", name, " = {} ")
    buffers[#buffers + 1] = name
    local scope = open_scope({}, list, list[1] and list[1].line or line)
    put("do local ", scope.table, " = {} ")
    scope.enter()
    block(list)
    put("end ")
    close_scope()
    use()
    buffers[#buffers] = nil
    put("end ")
  end

  -- A macro as an expression.  Its scope's table comes filled with the arguments that were given.
  local function macro(node)
    local names = {}
    for _, param in ipairs(node.params) do names[#names + 1] = param.name end
    put("macro(", quoted(node.name), ", { ")
    each(names, function(name) put(quoted(name)) end)
    put(" }, ")
    each({ "caller", "kwargs", "varargs" }, function(special)
      put(tostring(node.used[special] == true))
      if node.used[special] then names[#names + 1] = special end
    end)
    buffers[#buffers + 1] = "o"
    loops[#loops + 1] = false
    local scope = open_scope(names, node.body, node.line)
    put(", function(", scope.table, ", lacks) local o = {} ")
    for _, param in ipairs(node.params) do
      if param.default then
        at(param.line)
        put("if lacks[", quoted(param.name), "] then ", field(scope.table, param.name), " = ")
        expr(param.default)
        put(" end ")
      end
    end
    scope.enter()
    block(node.body)
    put("return concat(o) end)")
    close_scope()
    loops[#loops] = nil
    buffers[#buffers] = nil
  end

  local function contains_continue(list)
    for _, node in ipairs(list) do
      if node.t == "Continue" then return true end
      if node.body and node.t ~= "For" and contains_continue(node.body) then return true end
      for _, branch in ipairs(node.branches or {}) do
        if contains_continue(branch.body) then return true end
      end
      if node.otherwise and contains_continue(node.otherwise) then return true end
    end
    return false
  end

  local function target_names(target, names)
    if target.t == "Name" then
      names[#names + 1] = target.name
    elseif target.items then
      for _, item in ipairs(target.items) do target_names(item, names) end
    else
      fail(target.line, "can't assign to 'nsref'")
    end
    return names
  end

  local S = {}

  function S.Data(node) put(buffer(), "[#", buffer(), " + 1] = ", quoted(node.text), " ") end

  function S.Print(node)
    put("out(", buffer(), ", ")
    expr(node.node)
    put(") ")
  end

  function S.Do(node)
    put("do local _ = ")
    expr(node.node)
    put(" end ")
  end

  function S.Statements(node) block(node.list) end

  function S.If(node)
    soft = soft + 1
    for i, branch in ipairs(node.branches) do
      put(i == 1 and "if " or "elseif ")
      at(branch.line)
      cond(branch.test)
      put(" then ")
      block(branch.body)
    end
    if node.otherwise then
      put("else ")
      block(node.otherwise)
    end
    put("end ")
    soft = soft - 1
  end

  function S.For(node)
    local n = id()
    local items, count, i = "l" .. n, "n" .. n, "i" .. n
    local params = target_names(node.target, {})
    for _, name in ipairs(params) do
      if name == "loop" then fail(node.line, "Can't assign to special loop variable in for-loop") end
    end
    put("do local ", items, ", ", count, " = iter(")
    expr(node.iter)
    put(") ")
    if node.test then
      local kept = "k" .. n
      local scope = open_scope(params, {}, node.line)
      put("local ", kept, " = {} for i = 1, ", count, " do local ", scope.table, " = {} ")
      assign(node.target, items .. "[i]")
      put("if ")
      cond(node.test)
      put(" then ", kept, "[#", kept, " + 1] = ", items, "[i] end end ")
      put(items, ", ", count, " = ", kept, ", #", kept, " ")
      close_scope()
    end
    if node.uses_loop then
      params[#params + 1] = "loop"
      put("local lp = loop(", items, ", ", count, ") ")
    end
    local scope = open_scope(params, node.body, node.line)
    loops[#loops + 1] = { label = "c" .. n }
    put("for ", i, " = 1, ", count, " do ")
    if node.uses_loop then put("lp.i = ", i, " ") end
    put("do local ", scope.table, " = {", node.uses_loop and " loop = lp " or "", "} ")
    scope.enter()
    assign(node.target, items .. "[" .. i .. "]")
    block(node.body)
    put("end ")
    if contains_continue(node.body) then put("::c", tostring(n), ":: ") end
    put("end ")
    loops[#loops] = nil
    close_scope()
    if node.otherwise then
      local other = open_scope({}, node.otherwise, node.line)
      put("if ", count, " == 0 then local ", other.table, " = {} ")
      other.enter()
      block(node.otherwise)
      put("end ")
      close_scope()
    end
    put("end ")
  end

  function S.Break(node)
    if not loops[#loops] then fail(node.line, "'break' outside loop") end
    put("do break end ")
  end

  function S.Continue(node)
    if not loops[#loops] then fail(node.line, "'continue' outside loop") end
    put("goto ", loops[#loops].label, " ")
  end

  function S.Set(node)
    local value = "v" .. id()
    if node.target.t == "Name" then
      local scope = scopes[#scopes]
      put(field(scope and scope.table or "R", node.target.name), " = ")
      expr(node.value)
      put(" ")
      return
    end
    put("do local ", value, " = ")
    expr(node.value)
    put(" ")
    assign(node.target, value)
    put("end ")
  end

  function S.SetBlock(node)
    local value = "v" .. id()
    put("do local ", value, " ")
    capture(node.body, function()
      put(value, " = ")
      expr(node.filter)
      put(" ")
    end)
    assign(node.target, value)
    put("end ")
  end

  function S.FilterBlock(node)
    local outer = buffer()
    capture(node.body, function()
      put("out(", outer, ", ")
      expr(node.filter)
      put(") ")
    end)
  end

  function S.Macro(node)
    local scope = scopes[#scopes]
    put(field(scope and scope.table or "R", node.name), " = ")
    macro(node)
    put(" ")
  end

  function S.CallBlock(node)
    put("out(", buffer(), ", ")
    call(node.node, function() macro(node) end)
    put(") ")
  end

  function S.With(node)
    local values = {}
    put("do ")
    for i, value in ipairs(node.values) do
      values[i] = "w" .. id()
      put("local ", values[i], " = ")
      expr(value)
      put(" ")
    end
    local names = {}
    for _, target in ipairs(node.targets) do target_names(target, names) end
    local scope = open_scope(names, node.body, node.line)
    put("local ", scope.table, " = {} ")
    scope.enter()
    for i, target in ipairs(node.targets) do assign(target, values[i]) end
    block(node.body)
    put("end ")
    close_scope()
  end

  function S.Scope(node)
    local scope = open_scope({}, node.body, node.line)
    put("do local ", scope.table, " = {} ")
    scope.enter()
    block(node.body)
    put("end ")
    close_scope()
  end

  function statement(node)
    at(node.line)
    S[node.t](node)
  end

  local fields = {}
  for i, name in ipairs(IMPORTS) do fields[i] = "J." .. name end
  put("local J = ... local ", table.concat(IMPORTS, ", "), " = ", table.concat(fields, ", "))
  put(" return function(R) local o = {} ")
  block(tree)
  put("return o end")
  return table.concat(parts)
end

--- The text of a chunk that takes jinja_lib and gives a function: the table of variables in, the list of pieces out.
function M.compile(source) return emit(parse(tokens_of(source))) end

return M
