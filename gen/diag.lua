-- Mistakes in what a user wrote: collected with their positions, shown together, in the order of the files.
--
-- A stage reports and goes on; the driver stops after the stage that reported anything.  Errors of nmkgen itself are
-- Lua errors and never pass through here.
local M = {}

local Diag = {}
Diag.__index = Diag

function M.new()
  return setmetatable({ list = {}, files = {} }, Diag)
end

--- pos: { file, line, col }, any table that has those (a YAML node, say), or nil where no place is to blame.
function Diag:error(pos, fmt, ...)
  local file = pos and pos.file or "nmkgen"
  if not self.files[file] then
    self.files[file] = #self.list + 1
  end
  self.list[#self.list + 1] = {
    file = file,
    line = pos and pos.line,
    col = pos and pos.col,
    message = select("#", ...) > 0 and fmt:format(...) or fmt,
    order = #self.list,
  }
end

function Diag:count()
  return #self.list
end

--- Ends the run of stages if anything was reported: the collection itself is the Lua error.
function Diag:stop()
  if #self.list > 0 then
    error(self, 0)
  end
end

function M.is(value)
  return getmetatable(value) == Diag
end

--- The messages, `file:line:col: message`: files in the order in which they were first blamed, then by line; each once.
function Diag:lines()
  local sorted = table.move(self.list, 1, #self.list, 1, {})
  table.sort(sorted, function(a, b)
    if a.file ~= b.file then
      return self.files[a.file] < self.files[b.file]
    end
    if (a.line or 0) ~= (b.line or 0) then
      return (a.line or 0) < (b.line or 0)
    end
    if (a.col or 0) ~= (b.col or 0) then
      return (a.col or 0) < (b.col or 0)
    end
    return a.order < b.order
  end)
  local lines, seen = {}, {}
  for _, e in ipairs(sorted) do
    local where = e.line and ("%s:%d:%d"):format(e.file, e.line, e.col or 1) or e.file
    local line = where .. ": " .. e.message
    if not seen[line] then
      seen[line] = true
      lines[#lines + 1] = line
    end
  end
  return lines
end

-- Changes that turn a into b: insert, delete, replace, swap two neighbours.
local function distance(a, b)
  local before, last = {}, {}
  for j = 0, #b do
    last[j] = j
  end
  for i = 1, #a do
    local row = { [0] = i }
    for j = 1, #b do
      local same = a:byte(i) == b:byte(j)
      row[j] = math.min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (same and 0 or 1))
      if i > 1 and j > 1 and a:byte(i) == b:byte(j - 1) and a:byte(i - 1) == b:byte(j) then
        row[j] = math.min(row[j], before[j - 2] + 1)
      end
    end
    before, last = last, row
  end
  return last[#b]
end

--- The name most like `word`; nil if none is like it.  Of equals the first.
function M.nearest(word, names)
  local best, best_distance
  for _, name in ipairs(names) do
    local far = math.max(1, math.max(#word, #name) // 2)
    local d = math.abs(#word - #name) <= far and distance(word:lower(), name:lower()) or math.huge
    if d <= far and (not best or d < best_distance) then
      best, best_distance = name, d
    end
  end
  return best
end

--- The end of a message about an unknown name: the nearest known one, or all of them; and the nearest, if there is one.
function M.hint(word, names)
  local near = M.nearest(word, names)
  if near then
    return (", did you mean '%s'?"):format(near), near
  end
  return (", known are: %s"):format(table.concat(names, ", "))
end

return M
