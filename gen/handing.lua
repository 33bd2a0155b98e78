-- Sums that go to the storers at once.
--
-- What an SM sums up in registers (an op with the parameter `hands`) goes to its storers by a task of its own, which
-- adds it to the residual (`handed`). Where every such task follows directly on the one that ends the sum, and waits
-- for nothing, the op that ends the sum hands it on itself: the storers begin a task's dispatch earlier.
--
-- A decision for all tasks of an op, because it is a constant of the kernel. Check proves it from the words. Not with
-- schedule.exchange: validated, where it costs 1 to 2 % (tests/bench/RESULTS.md), nor with more columns than a
-- product has, of which one more copy of the handing is long and spills.
local ops = require("ops")

local M = {}

--- What is wrong with two tasks of a list, one after the other, where ops hand on as their parameters say; nil where
--- nothing is. hands, handed: of the task before and of this one; waits: whether this one waits.
function M.mistake(hands, handed, waits)
  if hands and not handed then return "hands on a sum that the next task does not take" end
  if handed and not hands then return "takes a sum that the task before has not handed on" end
  if handed and waits then return "waits, but its sum was handed on before" end
end

--- Requires: lists and waits. Leaves: the parameters `hands` and `handed` of g.params.
function M.run(g)
  local schedule = g.model.schedule
  if schedule.exchange == "validated" or ops.is_wide(schedule.columns) then return end
  local hands, handed = {}, {}                         -- [op] = true as long as nothing speaks against it
  for _, op in ipairs(g.registry.list) do
    for _, param in ipairs(g.used[op.name] and op.params or {}) do
      if param.name == "hands" then hands[op.name] = true end
      if param.name == "handed" then handed[op.name] = true end
    end
  end
  local changed
  repeat
    changed = false
    for sm = 0, g.sms - 1 do
      local list = g.lists[sm]
      for i = 1, #list + 1 do
        local before, task = list[i - 1], list[i]
        local from, to = before and before.node.op, task and task.node.op
        if M.mistake(hands[from], handed[to], task and task.waits[1]) then
          hands[from or ""], handed[to or ""], changed = nil, nil, true
        end
      end
    end
  until not changed
  for op in pairs(hands) do g.params[op].hands = 1 end
  for op in pairs(handed) do g.params[op].handed = 1 end
end

return M
