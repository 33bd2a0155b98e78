-- `nmkgen new-op NAME`: a complete op file to begin with, one of templates/new, which passes its own tests.
local diags = require("diag")
local host = require("host")

local M = {}

local KINDS = { "elementwise", "task" }
local LONGEST = 24
-- The opcode of a list's end, in emit/abi.lua.
local RESERVED = "end"

local function is_one_of(list, word)
  for _, known in ipairs(list) do
    if known == word then return true end
  end
  return false
end

--- Why the name cannot be an op's, or nil.
function M.refusal(name, registry)
  if not name:find("^%l[%l%d_]*$") then
    return "a name begins with a lower-case letter and has only lower-case letters, digits and _"
  elseif #name > LONGEST then
    return ("a name has at most %d letters"):format(LONGEST)
  elseif name:find("%d$") then
    return "a name does not end in a digit: the second node of an op is called so"
  elseif name:find("_$") or name:find("__") then
    return "a name has no _ at its end or beside another"
  elseif registry.by_name[name] then
    return ("there is an op of that name, %s"):format(registry.by_name[name].file)
  elseif name == RESERVED then
    return "the name is nmkgen's own"
  end
end

--- The path of the new file, what messages call it, and its text; nil after a message.
function M.scaffold(name, opts, registry, diag)
  local kind = opts.like or KINDS[1]
  if not is_one_of(KINDS, kind) then
    diag:error(nil, "--like: there is no '%s'%s", kind, diags.hint(kind, KINDS))
    return nil
  end
  local why = M.refusal(name, registry)
  if why then
    diag:error(nil, "new-op: '%s': %s", name, why)
    return nil
  end
  local called = ("%s/%s.cu"):format(opts.output or "templates/ops", name)
  local path = opts.output and called or host.root .. "/" .. called
  if host.read(path) then
    diag:error(nil, "new-op: %s exists already", called)
    return nil
  end
  local template = ("%s/templates/new/%s.cu"):format(host.root, kind)
  local text, missing = host.read(template)
  if not text then error(template .. ": " .. missing, 0) end
  return path, called, (text:gsub('name(%s*)= "NAME"', function(space) return ('name%s= "%s"'):format(space, name) end))
end

return M
