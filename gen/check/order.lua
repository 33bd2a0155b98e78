-- The part of the proof about buffers in global memory: node by node in the graph's order, every access against what
-- was done to the same units since the buffer was last written as a whole.
--
-- A history is the list of access groups of a buffer. It begins anew with a group that writes all of the buffer, or
-- with the passes of a wave that do so together: what came before is proved to come before whoever writes the same
-- unit, and what follows is proved to come after it. Not so with an optional node's: asleep it is no link between the
-- two.
local hb = require("hb")
local ops = require("ops")
local region = require("region")
local M = {}

local WORDS = ops.WORDS
local LOAD, COMPUTE, STORE = hb.ROLE.load, hb.ROLE.compute, hb.ROLE.store

-- True where member n of `later` knows from its own SM that member m of `earlier` is over.
local function known_own(later, n, earlier, m)
  local role, time, own = earlier.role, earlier.time[m], later.own[n]
  if earlier.sm[m] ~= later.sm[n] or role == STORE and later.role == STORE then return false end
  if hb.time_of(own, role) >= time then return true end
  local also = earlier.also
  return also ~= nil and later.role ~= also and hb.time_of(own, also) >= time
end

local function touch(later, n, earlier, m)
  return region.overlap(later.lo[n], later.hi[n], later.step[n], earlier.lo[m], earlier.hi[m], earlier.step[m])
end

local WHAT = {
  [true] = {
    [true] = "%s writes %s without being ordered after %s, which writes it before",
    [false] = "%s writes %s without being ordered after %s, which reads what it overwrites",
  },
  [false] = { [true] = "%s reads %s without being ordered after %s, which writes it" },
}

-- Every member of `later` against every member of `earlier` that it may touch.
function M:ordered(later, earlier, buffer)
  local last, unknown
  for n = 1, #later.sm do
    local base = later.base[n]
    if base ~= last then last, unknown = base, hb.unknown(earlier, base) end
    for i = 1, #unknown do
      local m = unknown[i]
      if not known_own(later, n, earlier, m) and touch(later, n, earlier, m) then
        self:report(later.node.name .. ">" .. earlier.node.name .. buffer.name, WHAT[later.writes][earlier.writes],
          self:name(later.sm[n], later.time[n]), buffer.name, self:name(earlier.sm[m], earlier.time[m]))
        break
      end
    end
  end
  self.stats.pairs = self.stats.pairs + #later.sm * #earlier.sm
end

-- A buffer whose words tell that they are there: all that use it know, and no word is written twice.
function M:posted(group, access, history, buffer)
  if (access.posted or false) ~= (buffer.posted or false) then
    local why = access.writes and "writes %s, whose words nobody awaits, and posts them" or
      "reads %s, whose words nobody posts, and awaits them"
    if buffer.posted then
      why = access.writes and "writes %s, whose words must tell that they are there, and posts none" or
        "reads %s, whose words tell that they are there, and does not await them"
    end
    self:report("posted" .. group.node.name .. buffer.name, "%s " .. why, group.node.name, buffer.name)
    return
  end
  for _, earlier in ipairs(access.posted and access.writes and history or {}) do
    for n = 1, earlier.writes and #group.sm or 0 do
      for m = 1, #earlier.sm do
        if touch(group, n, earlier, m) then
          self:report("again" .. group.node.name .. buffer.name, "%s writes %s again, after %s: words that tell " ..
            "that they are there are written once a step", self:name(group.sm[n], group.time[n]), buffer.name,
            self:name(earlier.sm[m], earlier.time[m]))
          return
        end
      end
    end
  end
end

-- What each member touches, as its words say.
function M:find_regions(group, region_of)
  local sms, times, words = group.sm, group.time, self.words
  hb.make_room(group, #sms)
  local los, his, steps = group.lo, group.hi, group.step
  for i = 1, #sms do
    local sm = sms[i]
    los[i], his[i], steps[i] = region_of(words[sm], (times[i] - 1) * WORDS, sm)
  end
end

-- Returns false where a region leaves the buffer.
function M:in_bounds(group, buffer, claim)
  local good = true
  for n = 1, claim and 0 or #group.sm do
    local lo, hi = group.lo[n], group.hi[n]
    if lo < 0 or hi > buffer.extent or group.step[n] < 1 then
      self:report("bounds" .. group.node.name, "%s: region %d to %d of %s is out of range, which has %d units",
        self:name(group.sm[n], group.time[n]), lo, hi - 1, buffer.name, buffer.extent)
      good = false
    end
  end
  return good
end

-- Whose each unit is that a group writes, and whether that is all of the buffer. Two tasks of a node may not write the
-- same, but may add to it; claimed units are somebody's, each once, by the op's contract.
function M:written_units(group, buffer, claim, adds)
  if claim then return {}, true end
  -- Mostly the members are side by side and all of the buffer: nobody asks for single units then.
  local at = 0
  for n = 1, #group.sm do
    if group.lo[n] ~= at or group.hi[n] <= at or group.step[n] ~= 1 then break end
    at = group.hi[n]
    if n == #group.sm and at == buffer.extent then return {}, true end
  end
  local owner, count = {}, 0
  for n = 1, #group.sm do
    for unit = group.lo[n], group.hi[n] - 1, group.step[n] do
      local other = owner[unit]
      if other and not adds then
        self:report("twice" .. group.node.name, "double arrival: %s and %s both write unit %d of %s",
          self:name(group.sm[other], group.time[other]), self:name(group.sm[n], group.time[n]), unit, buffer.name)
        return owner, false
      end
      owner[unit] = n
      count = count + (other and 0 or 1)
    end
  end
  return owner, count == buffer.extent
end

-- Whether a pass and those before it have written all of the buffer, by their access a.
function M:written_by_passes(plan, a, units, buffer)
  local first = self.plans[plan.node.first_pass]
  local written = first.groups[a].written or { count = 0 }
  first.groups[a].written = written
  for unit in pairs(units) do
    if not written[unit] then written[unit], written.count = true, written.count + 1 end
  end
  return written.count == buffer.extent
end

-- The history that begins anew with the passes of a node.
local function since_first_pass(history, node)
  local new = { full = true, units = {} }
  for _, group in ipairs(history) do
    if group.node.id >= node.first_pass.id then new[#new + 1] = group end
  end
  return new
end

-- The units that a group reads or adds to were all written in this step.
function M:all_written(group, history, buffer)
  if history.full then return end
  for n = 1, #group.sm do
    for unit = group.lo[n], group.hi[n] - 1, group.step[n] do
      if not history.units[unit] then
        self:report("unwritten" .. group.node.name, "%s %s unit %d of %s, which no earlier task of the step writes",
          self:name(group.sm[n], group.time[n]), group.writes and "adds to" or "reads", unit, buffer.name)
        return
      end
    end
  end
end

-- A node's tasks run in any order: none touches what another one writes. Within a task, compute comes before store
-- where hb.lua says so.
function M:apart(writes, access, d, buffer)
  local in_turn = access.role == writes.role or access.role == COMPUTE and writes.role == STORE and d.store_follows
  for n = 1, #writes.sm do
    for m = 1, #access.sm do
      local same_task = writes.sm[n] == access.sm[m] and writes.time[n] == access.time[m]
      if not (same_task and in_turn) and touch(writes, n, access, m) then
        self:report("apart" .. writes.node.name .. buffer.name, "%s writes %s without being ordered with %s, which " ..
          "%s it: nothing orders what is in one node", self:name(writes.sm[n], writes.time[n]), buffer.name,
          self:name(access.sm[m], access.time[m]), access.writes and "writes" or "reads")
        return
      end
    end
  end
end

-- The accesses of a node that are to one buffer.
function M:order_within(plan, bounded)
  local bind, accesses, groups = plan.node.bind, plan.d.accesses, plan.groups
  for a, writes in ipairs(accesses) do
    for b, access in ipairs(writes.writes and accesses or {}) do
      local other = a ~= b and (not access.writes or a < b)       -- two that write are one pair
      if other and bind[access.name] == bind[writes.name] and bounded[a] and bounded[b] then
        self:apart(groups[a], groups[b], plan.d, self.g.buffer[bind[writes.name]])
      end
    end
  end
end

--- Judges the accesses of one node. histories[buffer]: the groups so far, in the order of the nodes.
function M:order_node(plan, histories)
  local node, accesses = plan.node, plan.d.accesses
  local bounded = {}
  for a, access in ipairs(accesses) do
    local group, buffer = plan.groups[a], self.g.buffer[node.bind[access.name]]
    local history = histories[buffer] or { full = false, units = {} }
    histories[buffer] = history
    if access.role == LOAD and #history > 0 and node.spec.claim ~= "chunk" then
      self:report(nil, "%s: load reads %s, which this step writes: bulk copies may only read data older than the " ..
        "launch", node.name, buffer.name)
    end
    self:find_regions(group, access.region)
    bounded[a] = self:in_bounds(group, buffer, access.claim)
    if bounded[a] then
      self:posted(group, access, history, buffer)
      if access.adds or not access.writes then self:all_written(group, history, buffer) end
      for _, earlier in ipairs(history) do
        if access.writes or earlier.writes then self:ordered(group, earlier, buffer) end
      end
    end
  end
  self:order_within(plan, bounded)
  for a, access in ipairs(accesses) do
    local group, buffer = plan.groups[a], self.g.buffer[node.bind[access.name]]
    if access.writes and bounded[a] then
      local units, full = self:written_units(group, buffer, access.claim, access.adds)
      if node.first_pass ~= node.last_pass then full = self:written_by_passes(plan, a, units, buffer) end
      if full and not node.spec.optional then
        histories[buffer] = since_first_pass(histories[buffer], node)
      elseif full then
        histories[buffer].full = true
      elseif not histories[buffer].full then
        for unit in pairs(units) do histories[buffer].units[unit] = true end
      end
    end
    local history = histories[buffer]
    history[#history + 1] = group
  end
end

return M
