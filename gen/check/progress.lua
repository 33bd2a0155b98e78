-- The part of the proof that runs the lists: they come to their end, SM-local data is what the reader means, and on the
-- way every access gets the clock by which check/order.lua judges it.
--
-- Each SM is one sequential walker, so no queue has slack. Only what truly orders work goes into clocks: what hb.lua
-- says of the roles of a task, counters waited for in full, and the barrier of the route.
local hb = require("hb")
local ops = require("ops")
local zeros = require("zeros")
local M = {}

local ROLE = hb.ROLE
local LOAD, COMPUTE, STORE = ROLE.load, ROLE.compute, ROLE.store
local ROLES = #hb.ROLES
local LOAD_AND_COMPUTE = hb.only(LOAD, hb.MAX_TIME) | hb.only(COMPUTE, hb.MAX_TIME)
local WORDS, AT = ops.WORDS, ops.AT
local W_WAIT_A, W_ARRIVALS_A, W_WAIT_B, W_ARRIVALS_B = AT.wait_a, AT.arrivals_a, AT.wait_b, AT.arrivals_b
local W_SIGNAL, W_LOCAL = AT.signal, AT["local"]

-- A wait against what the counter gets.
function M:check_wait(counter, arrivals, sm, time)
  local c = self.counters[counter]
  self.stats.waits = self.stats.waits + 1
  if not c then
    self:report("wait" .. counter, "%s waits for counter %d, which nothing signals", self:name(sm, time), counter)
  elseif arrivals > c.arrivals then
    self:report("high" .. counter, "%s waits for %d arrivals of %s, which can never be met: it gets %d",
      self:name(sm, time), arrivals, self:counter_name(counter), c.arrivals)
  elseif arrivals < c.arrivals then
    self:report("low" .. counter, "%s waits for only %d of the %d arrivals of %s: a partial wait does not say who " ..
      "arrived", self:name(sm, time), arrivals, c.arrivals, self:counter_name(counter))
  else
    local d = self.plan_at[sm][time].d
    for s, clocks in ipairs(self.sets) do
      local learns = c.base and c.base[s] and (clocks == self.hints or not d.hinted)
      if learns then clocks:learn_base(sm, d.wait, c.base[s]) end
    end
  end
end

local function writer_name(node) return node and node.name or "nobody" end

-- Whose data an SM holds by the graph.
local function expected_writer(writers, sm)
  for _, node in ipairs(writers) do
    if node.spec.tile ~= "owner" or sm < node.tiles then return node end
  end
  return false
end

-- Registers: who wrote them last on this SM.
function M:use_registers(plan, state, sm, time)
  local uses, writer = plan.d.registers, state.writer
  for i = 1, #uses do
    local name = uses[i].name
    if not uses[i].writes then
      local expected = expected_writer(plan.expect[name], sm)
      if (writer[name] or false) ~= expected then
        self:report(name .. plan.node.name, "%s reads %s as %s left it, the graph says %s", self:name(sm, time), name,
          writer_name(writer[name]), writer_name(expected))
      end
    end
  end
  for i = 1, #uses do
    if uses[i].writes then writer[uses[i].name] = plan.node end
  end
end

-- True where a role of the SM knows that role `of` is past `time`.
local function knows(clocks, sm, role, of, time)
  local thread = sm * ROLES + role
  return clocks.base[thread][sm * ROLES + of] >= time or hb.time_of(clocks.own[thread], of) >= time
end

-- Readers of an instance learn what its writer knew. Returns false where the writer comes later in the list: the
-- producer would keep all that follows from being loaded.
function M:read_local(plan, state, instance, sm, time)
  local d, clocks, sets = plan.d, self.clocks, self.sets
  local found, older = state.instances[instance], state.instances[instance - 2]
  if not found then
    self:report("ring" .. sm, "the ring blocks: %s waits for instance %d of %s, which no earlier task of the SM writes",
      self:name(sm, time), instance, d.local_name)
    return false
  end
  local expected = expected_writer(plan.expect[d.local_name], sm)
  if found.node ~= expected then
    self:report(d.local_name .. plan.node.name, "%s reads instance %d of %s as %s left it, the graph says %s",
      self:name(sm, time), instance, d.local_name, found.node.name, writer_name(expected))
  end
  for i = 1, #d.local_readers do
    local role = d.local_readers[i]
    -- The barrier tells instance n from n - 2 by one bit.
    if older and not knows(clocks, sm, role, older.role, older.time) then
      self:report("phase" .. plan.node.name, "%s: role %s may take instance %d of %s for instance %d",
        self:name(sm, time), hb.ROLES[role], instance - 2, d.local_name, instance)
    end
    for s = 1, #sets do sets[s]:recall(sm, role, found.memories[s]) end
    local readers = found.readers
    readers[#readers + 1] = role
    readers[#readers + 1] = time
  end
  if d.local_returner then
    found.returns, found.returner, found.returned = found.returns + 1, d.local_returner, time
  end
  return true
end

function M:write_local(plan, state, instance, sm, time)
  local d, clocks = plan.d, self.clocks
  if instance ~= state.written then
    self:report("instance" .. sm, "%s writes instance %d of %s, the SM's next is %d", self:name(sm, time), instance,
      d.local_name, state.written)
  end
  for n = instance - 2, instance, 2 do                -- what was in the same copy
    local older = state.instances[n]
    local waits = older and n < instance and d.local_waits
    if waits and older.returns ~= 1 then
      self:report("returned" .. plan.node.name, "%s waits until instance %d of %s is returned, as %d tasks do",
        self:name(sm, time), n, d.local_name, older.returns)
    end
    for i = 1, older and #older.readers or 0, 2 do
      local role, when = older.readers[i], older.readers[i + 1]
      local returned = waits and role == older.returner and when <= older.returned
      if not returned and not knows(clocks, sm, d.local_writer, role, when) then
        self:report("copy" .. plan.node.name, "%s overwrites the copy of %s that role %s of %s still reads " ..
          "(instance %d)", self:name(sm, time), d.local_name, hb.ROLES[role], self:name(sm, when), n)
      end
    end
  end
  local memories = {}
  for s, each in ipairs(self.sets) do memories[s] = each:remember(sm, d.local_writer) end
  state.instances[instance] = {
    node = plan.node, role = d.local_writer, time = time, readers = {}, returns = 0, memories = memories,
  }
  state.written = instance + 1
end

-- Notes what the role of each access knows. i: the task's number in the plan.
function M:note(plan, i, sm)
  local accesses, groups, first = plan.d.accesses, plan.groups, sm * ROLES
  for a = 1, #accesses do
    local group, role = groups[a], accesses[a].role
    local clocks = accesses[a].posted and self.hints or self.clocks
    local bases, owns = clocks.base, clocks.own
    local base, own = bases[first + role], owns[first + role]
    if role == STORE and plan.d.also then
      -- A store that happens comes after its compute, although the signal may not.
      base = clocks:join(base, bases[first + COMPUTE])
      own = hb.later(own, owns[first + COMPUTE] & LOAD_AND_COMPUTE)
    end
    group.base[i], group.own[i] = base, own
  end
end

function M:arrive(signal, role, sm, relaxed)
  local c, sets = self.counters[signal], self.sets
  c.clock = c.clock or {}
  for s = 1, #sets do
    local clocks = sets[s]
    c.clock[s] = c.clock[s] or clocks:new_counter()
    if relaxed and clocks ~= self.hints then c.orders_nothing = true end
    clocks:arrive(c.clock[s], sm, role)
  end
  c.pending = c.pending - 1
  if c.pending > 0 then return end
  c.base = {}
  for s = 1, #sets do
    c.base[s] = not (c.orders_nothing and sets[s] ~= self.hints) and sets[s]:close(c.clock[s])
  end
  for _, waiting in ipairs(c.waiting or {}) do self.ready[#self.ready + 1] = waiting end
end

-- One task that no counter keeps. Returns false where its SM's ring blocks.
function M:run_task(plan, words, start, sm, time, state)
  local d, sets = plan.d, self.sets
  for s = 1, #sets do
    for i = 1, #d.roles do sets[s]:enter(sm, d.roles[i], time) end
  end
  if #d.local_readers > 0 and not self:read_local(plan, state, words[start + W_LOCAL], sm, time) then return false end
  for s = 1, d.load_feeds and #sets or 0 do sets[s]:learn(sm, d.compute and COMPUTE or STORE, LOAD) end
  local first, second = words[start + W_WAIT_A], words[start + W_WAIT_B]
  if first ~= -1 then self:check_wait(first, words[start + W_ARRIVALS_A], sm, time) end
  if second ~= -1 then
    self:check_wait(second, words[start + W_ARRIVALS_B], sm, time)
    -- Who finds no first wait does not look for a second.
    if first == -1 then self:report("second" .. second, "%s has a second wait but no first", self:name(sm, time)) end
  end
  for s = 1, #sets do
    if d.wait == LOAD then sets[s]:learn(sm, COMPUTE, LOAD) end
    if d.store_follows then sets[s]:learn(sm, STORE, COMPUTE) end
  end
  if #d.registers > 0 then self:use_registers(plan, state, sm, time) end
  if d.local_writer then self:write_local(plan, state, words[start + W_LOCAL], sm, time) end
  self:note(plan, self.index_at[sm][time], sm)
  local signal = words[start + W_SIGNAL]
  if signal ~= -1 and d.signal then self:arrive(signal, d.signal, sm, d.relaxed) end
  return true
end

-- The counter that keeps a task from running, or nil. Counters that get too little are another message's matter.
function M:blocked_by(words, start)
  local counter = words[start + W_WAIT_A]
  local c = counter ~= -1 and self.counters[counter]
  if c and c.pending > 0 then return counter end
  counter = words[start + W_WAIT_B]
  c = counter ~= -1 and self.counters[counter]
  if c and c.pending > 0 then return counter end
end

-- Lets an SM run until a counter keeps it.
function M:run_sm(sm)
  local words, plan_at, state = self.words[sm], self.plan_at[sm], self.locals[sm]
  for time = state.done + 1, #plan_at do
    local start = (time - 1) * WORDS
    local blocked = self:blocked_by(words, start)
    if blocked then
      local c = self.counters[blocked]
      c.waiting = c.waiting or {}
      c.waiting[#c.waiting + 1] = sm
      return
    end
    local plan = plan_at[time]
    if plan and not self:run_task(plan, words, start, sm, time, state) then return end
    state.done = time
  end
end

--- Runs all lists. Returns true where all come to their end.
function M:simulate()
  local sms = self.g.sms
  -- hints: also of counters that order nothing; see check.lua
  self.hints, self.locals, self.ready = hb.new(sms), {}, {}
  self.clocks = hb.any_relaxed(self.g) and hb.new(sms) or self.hints
  self.sets = self.clocks == self.hints and { self.hints } or { self.hints, self.clocks }
  for sm = 0, sms - 1 do
    -- done: tasks run; writer: of registers; instances, written: of the data in shared memory
    self.locals[sm] = { done = 0, writer = {}, instances = {}, written = 0 }
    self.ready[sm + 1] = sm
  end
  for _, plan in pairs(self.plans) do
    for _, group in ipairs(plan.groups) do group.base, group.own = zeros(plan.tasks), zeros(plan.tasks) end
  end
  local next_ready = 1
  while next_ready <= #self.ready do
    self:run_sm(self.ready[next_ready])
    next_ready = next_ready + 1
  end
  self.stats.bases = self.clocks.bases
  for sm = 0, sms - 1 do
    if self.locals[sm].done < #self.plan_at[sm] then
      self:explain_deadlock(sm)
      return false
    end
  end
  return true
end

-- The first task that still has to signal a counter.
function M:lacking(counter)
  local last = self.counters[counter].node.last_pass
  for id = 1, last.id do
    local plan = self.g.nodes[id].last_pass == last and self.plans[self.g.nodes[id]]
    for i = 1, plan and plan.tasks or 0 do
      local sm, time = plan.sm[i], plan.time[i]
      if time > self.locals[sm].done and self.words[sm][(time - 1) * WORDS + W_SIGNAL] == counter then
        return sm, time
      end
    end
  end
end

-- Follows who waits for whom until an SM comes up again; who ends at a ring that blocks has its message.
function M:explain_deadlock(sm)
  local path, seen = {}, {}
  while not seen[sm] do
    local time = self.locals[sm].done + 1
    local counter = self:blocked_by(self.words[sm], (time - 1) * WORDS)
    local other, when
    if counter then other, when = self:lacking(counter) end
    if not other then return end
    seen[sm] = #path + 1
    path[#path + 1] = ("%s waits for %s, which lacks %s"):format(self:name(sm, time), self:counter_name(counter),
      self:name(other, when))
    sm = other
  end
  self:report(nil, "deadlock: %s", table.concat(path, "; ", seen[sm]))
end

return M
