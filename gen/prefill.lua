-- The prefill generation of a model: a second kernel, with lists of its own, that takes whole chunks of prompts.
--
-- It is the same spec and the same packed weights, and every stage treats it as any model.  What is different is in the
-- model that `of` makes: the family's `prefill` in place of its step, a wave order of that, and opcodes of launch
-- "prefill" alone.  How many tokens a chunk has only run time knows, so every SM has one task of each node, and takes
-- units of what the chunk has (claim = "chunk" of the ops).
local abi = require("emit.abi")
local families = require("family")
local ops = require("ops")
local rows = require("rows")

local M = {}

-- The first node of a step that an insertion stands in, in words; nil: none is in a layer, or in front of the layers.
local function inserted(model)
  local family = model.family_module
  for _, list in ipairs({ family.insert and family.insert(model) or {}, model.insert or {} }) do
    for _, ins in ipairs(list) do
      if ins.layers ~= "outside" and ins.value ~= "final_logits" then return ins end
    end
  end
end

--- The model as its prefill generation sees it; nil, why where there is none.
function M.of(model)
  local family = model.family_module
  if model.prefill.tokens == 0 then return nil, "prefill.tokens is 0" end
  if not family.prefill then return nil, ("the family %s has none"):format(family.name) end
  local ins = inserted(model)
  if ins then return nil, ("op '%s' is inserted at %s, which prefill has not"):format(ins.op, ins.value) end
  local parts = setmetatable({ insert = false, back = function() return {} end }, { __index = family })
  for _, part in ipairs({ "waves", "values", "buffers", "front", "block" }) do parts[part] = family.prefill[part] end
  function parts.at(part)
    local value = family.prefill[part]
    return type(value) == "function" and families.place(value, family.at("prefill").file) or family.at(part)
  end
  local schedule = setmetatable({
    columns = ops.TILE_COLUMNS, order = rows.names(parts.waves),
  }, { __index = model.schedule })
  local of_prefill = setmetatable({
    launch = "prefill", family_module = parts, schedule = schedule, insert = {},
  }, { __index = model })
  -- Its ring is of other stages, in the same memory: all that there is, whatever the step does with less.
  schedule.ring_stages = math.min(abi.MOST_RING_STAGES, abi.most_ring_stages(of_prefill))
  return of_prefill
end

--- Judges what the family makes of the model here, as of its step; mistakes in diag.
function M.check(model, diag)
  families.check(model, model.family_module, diag)
end

return M
