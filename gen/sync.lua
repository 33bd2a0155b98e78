-- Waits and counters, derived from what the ops declare to read and write.
--
-- Nodes are visited in wave order. For every task the clocks say which earlier conflicting accesses it already knows to
-- be over; for those it does not know of, it waits for the counter of the node that made them, or, where that node has
-- no counter of its own, of the earliest later node that knows. A wait is always for all arrivals of a counter: a
-- partial count does not say who arrived. The passes of one wave signal one counter, that of the last pass.
--
-- With schedule.exchange: validated there are nodes whose signals order nothing (op.relaxed): what they write tells by
-- itself that it is there. So there are two sets of clocks. The hints learn from every counter: by them who reads such
-- data waits, so that it hardly ever looks in vain, and nobody looks for what has yet to be begun. The others learn
-- from counters that order, and all other buffers go by them.
--
-- What orders work without a counter: program order of a role, load before compute before store of one task as far as
-- hb.lua says, and the SM-local route data (word `local`), which a reading role waits for. The two store warps of an SM
-- run on their own, so their program order does not order stores of one task before those of the next.
local hb = require("hb")
local ops = require("ops")
local region = require("region")
local zeros = require("zeros")
local M = {}

local MAX_WAITS = 2             -- that a descriptor has room for

local ROLE = hb.ROLE
local ROLES = #hb.ROLES
local STORE = ROLE.store
local time_of = hb.time_of
local NO_WAITS = {}

-- Who runs after whose wait in one task.
local COVERS = {
  load = { load = true, compute = true }, compute = { compute = true, store = true }, store = { store = true },
  help = { help = true },
}

-- What sync needs of an op: accesses to global buffers and the roles that use shared-memory data.
local function digest(g, op, shared)
  local d = hb.roles_of(op)
  d.accesses, d.local_readers, d.local_writer = {}, {}, nil
  local ambient = { sm = "sm", sms = g.sms, columns = g.columns }
  local function resolve(name)
    return tostring(ambient[name] or g.params[op.name][name] or ("f[%q]"):format(name))
  end
  for _, way in ipairs({ "reads", "writes" }) do
    for _, r in ipairs(op[way]) do
      if r.global then
        d.accesses[#d.accesses + 1] = {
          name = r.name, role_name = r.role, role = hb.role_of(op, r.role), writes = way == "writes", claim = r.claim,
          adds = r.adds, posted = r.posted, covered = COVERS[op.wait][r.role] or false,
          region = region.compile(r, "f, sm", resolve),
        }
      elseif r.scope == "sm" and shared[r.name] then
        if way == "writes" then
          d.local_writer = hb.role_of(op, r.role)
        else
          d.local_readers[#d.local_readers + 1] = hb.role_of(op, r.role)
        end
      end
    end
  end
  return d
end

local Sync = {}
Sync.__index = Sync

-- The clocks that an access goes by.
function Sync:clocks_of(access) return access.posted and self.hints or self.clocks end

-- A node's counter as each set of clocks sees it.
function Sync:new_counters(op)
  local counters = {}
  for s, clocks in ipairs(self.sets) do
    counters[s] = (clocks == self.hints or not op.relaxed) and clocks:new_counter() or false
  end
  return counters
end

-- True where a member of the group, of those `unknown`, touches what the task's access touches and the access is not
-- ordered after it by the own SM's clocks either.
function Sync:conflicts(group, unknown, access, task, wait)
  local sm, own = task.sm, self:clocks_of(access).own
  local sms, los, his, steps = group.sm, group.lo, group.hi, group.step
  local lo, hi, step = access.region(task.fields, sm)
  for i = 1, #unknown do
    local m = unknown[i]
    local lo_m, hi_m, step_m = los[m], his[m], steps[m]
    if lo < hi_m and lo_m < hi and (step == 1 and step_m == 1 and lo < hi and lo_m < hi_m
      or region.overlap(lo, hi, step, lo_m, hi_m, step_m)) then
      if sms[m] ~= sm or group.role == STORE and access.role == STORE then return true end
      local role, time = group.role, group.time[m]
      if time_of(own[sm * ROLES + access.role], role) < time and time_of(own[sm * ROLES + wait], role) < time then
        return true
      end
    end
  end
  return false
end

-- Of what was done to the buffer before, the latest first: what the access must come after and who knows `base` does
-- not know to be over. Kept while a node is visited: the history is the same for all its tasks.
local function open_groups(access, base)
  local open, history = {}, access.history
  for h = #history, 1, -1 do
    local group = history[h]
    if (group.writes or access.writes) and #hb.unknown(group, base) > 0 then open[#open + 1] = group end
  end
  access.open[base] = open
  return open
end

-- The latest earlier group that an access of the task must come after and, as things stand, does not.
function Sync:missing(node, task, d)
  local sm, latest, posted = task.sm, nil, nil
  for a = 1, #d.accesses do
    local access = d.accesses[a]
    local clocks = self:clocks_of(access)
    local bases = clocks.base
    local wait = access.covered and d.wait or access.role
    local base = bases[sm * ROLES + access.role]
    if wait ~= access.role then
      local more = bases[sm * ROLES + wait]
      if more ~= base then base = clocks:join(base, more) end
    end
    local open = access.open[base] or open_groups(access, base)
    for i = 1, #open do
      local group = open[i]
      local matters = not latest or group.node.id > latest.node.id or not access.covered
      if matters and self:conflicts(group, group.unknown[base], access, task, wait) then
        if not access.covered then
          self:fail(node.spec, "%s on SM %d: role %s uses %s after %s, but the op waits in role %s", node.name, sm,
            access.role_name, access.name, group.node.name, node.spec.wait)
        else
          latest, posted = group, access.posted
        end
      end
    end
  end
  return latest, posted
end

-- The counter to wait for so that the group's accesses are known to be over: the earliest node that says so. bases:
-- what counters tell, as it is to be known.
function Sync:counter_for(group, before, bases)
  if group.source then return group.source end
  for id = group.node.id, before.id - 1 do
    local base = bases[id]
    if base and #hb.unknown(group, base) == 0 then
      group.source = self.g.nodes[id]
      return group.source
    end
  end
end

function Sync:fail(op, fmt, ...)
  self.diag:error({ file = op.file, line = 1, col = 1 }, fmt, ...)
end

-- The wait for a node's counter: one table for all who wait.
function Sync:wait_for(source)
  local wait = self.waits[source]
  if not wait then
    wait = { node = source, arrivals = self.arrivals[source], alone = {} }
    wait.alone[1] = wait
    self.waits[source] = wait
  end
  return wait
end

-- Adds to the task the waits it needs.
function Sync:add_waits(node, task, d)
  local sm, wait = task.sm, d.wait
  local waits = NO_WAITS
  while true do
    local latest, posted = self:missing(node, task, d)
    if not latest then break end
    local source = self:counter_for(latest, node, posted and self.hints.told or self.clocks.told)
    if not source then
      self:fail(node.spec, "%s on SM %d must come after %s, and no counter says when that is over", node.name, sm,
        latest.node.name)
      break
    end
    if #waits == MAX_WAITS then
      self:fail(node.spec, "%s on SM %d needs more than %d waits: %s, %s and %s", node.name, sm, MAX_WAITS,
        waits[1].node.name, waits[2].node.name, source.name)
      break
    end
    local more = self:wait_for(source)
    waits = waits[1] and { waits[1], more } or more.alone
    for _, clocks in ipairs(self.sets) do
      local learns = clocks.told[source.id] and (clocks == self.hints or not d.hinted)
      if learns then clocks:learn_base(sm, wait, clocks.told[source.id]) end
    end
  end
  task.waits = waits
end

-- The clocks of one task's roles, in the order in which they run; waits are added on the way. i: the task's number in
-- the node.
function Sync:visit(node, task, d, counters, i)
  local sets, sm = self.sets, task.sm
  local time = self.time[sm] + 1
  self.time[sm] = time
  local instances = self.instances[sm]
  task["local"] = 0
  if d.local_writer then
    task["local"] = #instances
  elseif #d.local_readers > 0 then
    if #instances == 0 then
      self:fail(node.spec, "%s on SM %d reads SM-local data that no earlier task writes", node.name, sm)
    else
      task["local"] = #instances - 1
    end
  end
  for s = 1, #sets do
    local clocks = sets[s]
    for k = 1, #d.roles do clocks:enter(sm, d.roles[k], time) end
    for k = 1, #instances > 0 and #d.local_readers or 0 do
      clocks:recall(sm, d.local_readers[k], instances[#instances][s])
    end
    if d.load_feeds then clocks:learn(sm, d.compute and ROLE.compute or STORE, ROLE.load) end
  end
  self:add_waits(node, task, d)
  local memories = d.local_writer and {}
  for s = 1, #sets do
    local clocks = sets[s]
    if d.wait == ROLE.load then clocks:learn(sm, ROLE.compute, ROLE.load) end
    if d.store_follows then clocks:learn(sm, STORE, ROLE.compute) end
    if memories then memories[s] = clocks:remember(sm, d.local_writer) end
    if counters and counters[s] then clocks:arrive(counters[s], sm, d.signal) end
  end
  if memories then instances[#instances + 1] = memories end
  self.node_sms[i], self.node_times[i] = sm, time
  for a = 1, #d.accesses do
    local access = d.accesses[a]
    local group, lo, hi, step = access.group, access.region(task.fields, sm)
    group.lo[i], group.hi[i], group.step[i] = lo, hi, step
    access.units = access.units + region.count(lo, hi, step)
  end
end

-- What is left of a history that begins anew with the passes of a node: each unit's earlier accesses come
-- before the pass that writes the unit.
local function since_first_pass(history, node)
  local from = #history + 1
  while from > 1 and history[from - 1].node.id >= node.first_pass.id do from = from - 1 end
  return table.move(history, from, #history, 1, {})
end

function Sync:visit_node(node)
  local d, tasks = self.digests[node.op], node.tasks
  self.node_sms, self.node_times = zeros(#tasks), zeros(#tasks)
  for _, access in ipairs(d.accesses) do
    access.group = hb.new_group(node, access.role, access.writes, access.role == ROLE.compute and d.also or nil,
      self.node_sms, self.node_times)
    hb.make_room(access.group, #tasks)
    access.history, access.open, access.units = self.history[node.bind[access.name]] or {}, {}, 0
  end
  local last = node.last_pass
  local counters = d.signal and (self.open[last] or self:new_counters(node.spec))
  self.open[last] = node ~= last and counters or nil
  for i, task in ipairs(tasks) do self:visit(node, task, d, counters, i) end
  if counters then
    self.arrivals[last] = (self.arrivals[last] or 0) + #tasks * node.spec.arrivals
    for s, clocks in ipairs(node == last and self.arrivals[last] > 0 and self.sets or {}) do
      if counters[s] then clocks.told[node.id] = clocks:close(counters[s]) end
    end
  end
  for _, access in ipairs(d.accesses) do
    local actual = node.bind[access.name]
    local history = self.history[actual] or {}          -- not access.history: the node may have begun it anew
    local whole = access.claim or not access.adds and self:pass_units(last, access) >= self.g.buffer[actual].extent
    -- Asleep an optional node leaves what was there, and who comes later must come after that too.
    if access.writes and whole and not node.spec.optional then history = since_first_pass(history, node) end
    history[#history + 1] = access.group
    self.history[actual] = history
  end
end

-- Units that the passes of a wave have touched so far, the present one's among them.
function Sync:pass_units(last, access)
  local units = self.units[last] or {}
  self.units[last] = units
  units[access] = (units[access] or 0) + access.units
  return units[access]
end

--- Requires: node.tasks and lists in wave order. Leaves: task.waits = { { node, counter, arrivals } ... }, node.counter
--- of the nodes that are waited for (0-based, in wave order), task["local"], g.counters.
function M.run(g, diag)
  local self = setmetatable({
    g = g, diag = diag, hints = hb.new(g.sms), digests = {},
    history = {},               -- [buffer] = groups since it was last written as a whole
    time = {},                  -- [sm] = tasks so far
    waits = {},                 -- [node] = the wait for its counter
    instances = {},             -- [sm] = what the writer of each instance of SM-local data knew
    open = {},                  -- [last pass] = the counter of passes that are not all visited
    arrivals = {},              -- [last pass] = what the counter of its passes gets
    units = {},                 -- [last pass][access] = units that its passes have touched
  }, Sync)
  -- of each set, told[node id] = what who waits for the node's counter learns
  self.clocks = hb.any_relaxed(g) and hb.new(g.sms) or self.hints
  self.sets = self.clocks == self.hints and { self.hints } or { self.hints, self.clocks }
  for _, clocks in ipairs(self.sets) do clocks.told = {} end
  local shared = ops.shared_buffers(g.registry)
  for _, op in ipairs(g.registry.list) do
    if g.used[op.name] then self.digests[op.name] = digest(g, op, shared) end
  end
  for sm = 0, g.sms - 1 do
    if #g.lists[sm] > hb.MAX_TIME then
      diag:error({ file = g.model.source }, "SM %d has %d tasks, a list holds at most %d", sm, #g.lists[sm],
        hb.MAX_TIME)
      return g
    end
    self.time[sm], self.instances[sm] = 0, {}
  end
  for _, node in ipairs(g.nodes) do self:visit_node(node) end

  g.counters = 0
  for _, node in ipairs(g.nodes) do
    node.counter = nil
    local wait = self.waits[node]
    if wait then
      node.counter, wait.counter = g.counters, g.counters
      g.counters = g.counters + 1
    end
  end
  return g
end

return M
