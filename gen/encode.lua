-- Tasks as the words the machines read. check.lua judges these words, and the emitted encoder must produce the same.
--
-- words[sm] is a flat array, ops.WORDS per task, without the end of the list. Lua indices from 1: word w of task i
-- (both from 0) is words[sm][i * ops.WORDS + w + 1].
local ops = require("ops")
local zeros = require("zeros")

local M = {}

local AT = ops.AT

local math_type = math.type

-- What a word may hold.
local function checked(node, field, value)
  if field.type == "f32" and type(value) == "number" then
    return (string.unpack("<i4", string.pack("<f", value)))
  end
  if math_type(value) ~= "integer" or value < -0x80000000 or value > 0x7fffffff then
    error(("%s: field '%s' is %s, not a 32-bit integer"):format(node.name, field.name, tostring(value)))
  end
  return value
end

--- What all tasks of a node share: words, and which is the last in use; own[name], the fields that a task may bring
--- itself; missing, the list of those that each must bring.
local function node_words(g, op, node)
  local words, own, missing, last = {}, {}, {}, ops.FIRST_WORD
  for i = 1, ops.WORDS do
    words[i] = 0
  end
  words[AT.opcode], words[AT.node], words[AT.signal] = op.opcode, node.id - 1, node.last_pass.counter or -1
  for _, field in ipairs(op.fields) do
    last = math.max(last, field.word + 1)
    if field.buffer then
      words[field.word + 1] = checked(node, field, g.buffer[node.bind[field.buffer]].offset128)
    else
      own[field.name] = field
      local value = node.fields[field.name]
      if value ~= nil then
        words[field.word + 1] = checked(node, field, value)
      else
        missing[#missing + 1] = field
      end
    end
  end
  return { words = words, last = last, own = own, missing = missing }
end

--- Requires: tasks with fields, waits and offsets. Leaves: words[sm], sm from 0.
function M.words(g, registry)
  local words, shared = {}, {}
  local wait_a, arrivals_a, wait_b, arrivals_b = AT.wait_a, AT.arrivals_a, AT.wait_b, AT.arrivals_b
  local instance = AT["local"]
  for sm, list in pairs(g.lists) do
    local out, n = zeros(#list * ops.WORDS), 0
    for _, task in ipairs(list) do
      local node = task.node
      local of_node = shared[node]
      if not of_node then
        of_node = node_words(g, registry.by_name[node.op], node)
        shared[node] = of_node
      end
      table.move(of_node.words, 1, of_node.last, n + 1, out)
      local a, b = task.waits[1], task.waits[2]
      out[n + wait_a], out[n + arrivals_a] = a and a.counter or -1, a and a.arrivals or 0
      out[n + wait_b], out[n + arrivals_b] = b and b.counter or -1, b and b.arrivals or 0
      out[n + instance] = task["local"]
      local fields = task.fields
      for _, field in ipairs(of_node.missing) do
        if fields[field.name] == nil then checked(node, field, nil) end
      end
      if fields ~= node.fields then
        for name, value in next, fields do              -- a task's own; the node's are behind it
          local field = of_node.own[name]
          if field then out[n + field.word + 1] = checked(node, field, value) end
        end
      end
      n = n + ops.WORDS
    end
    words[sm] = out
  end
  return words
end

--- 64-bit FNV-1a over 32-bit words: of every SM the number of tasks, then their words.
function M.hash(words, sms)
  local hash = 0xcbf29ce484222325
  for sm = 0, sms - 1 do
    local list = words[sm]
    hash = (hash ~ (#list // ops.WORDS)) * 0x100000001b3
    for i = 1, #list do
      hash = (hash ~ (list[i] & 0xffffffff)) * 0x100000001b3
    end
  end
  return hash
end

return M
