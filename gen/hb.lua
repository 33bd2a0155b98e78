-- Happens-before: who knows of whose work, for all (SM, role) threads at once.
--
-- A thread walks its SM's list, so the number of a task in the list is its time, and a vector clock says for every
-- thread up to which task its work is known. Three facts keep clocks cheap. Knowledge of other SMs only ever arrives
-- through a counter that everybody waits for in full, so threads share few distinct vectors: a clock is a shared,
-- immutable base plus what is known of the own SM. That is a number for each role, and all of them fit into one integer
-- (`own`). And joins of bases are remembered, so that most are a table lookup.
--
-- Optional tasks (ops.lua) run in all SMs or in none, and sleeping they signal without having waited. So they are a
-- thread of their own in each SM: it begins with what the helper knows, whose place in the list it takes, and keeps
-- what it waits for to itself. Of such a task a counter only ever tells that it is over.
--
-- Knows threads, times, regions and how the roles of a task follow one another; not what is waited for or why.
local abi = require("emit.abi")
local zeros = require("zeros")
local M = {}

M.ROLES = { "load", "compute", "store", "help", "optional" }
M.ROLE = { load = 1, compute = 2, store = 3, help = 4, optional = 5 }
local ROLES = #M.ROLES
local HELP, OPTIONAL = M.ROLE.help, M.ROLE.optional

-- The times of an SM's roles in one integer, role 1 in the lowest bits: what a list's numbers of tasks need, no more.
local BITS = abi.TASK_BITS
local MASK = (1 << BITS) - 1
assert(ROLES * BITS < 64)
M.MAX_TIME = MASK

-- Where a role's time is, and all but that.
local SHIFT, OTHERS = {}, {}
for role = 1, ROLES do SHIFT[role], OTHERS[role] = (role - 1) * BITS, ~(MASK << (role - 1) * BITS) end

-- Every other role's bits, and the bit above each: subtracting borrows from that where the other time is later.
local ODD, EVEN, ABOVE_ODD, ABOVE_EVEN = 0, 0, 0, 0
for role = 1, ROLES do
  local bits, above = MASK << SHIFT[role], 1 << SHIFT[role] + BITS
  if role % 2 == 1 then
    ODD, ABOVE_ODD = ODD | bits, ABOVE_ODD | above
  else
    EVEN, ABOVE_EVEN = EVEN | bits, ABOVE_EVEN | above
  end
end

-- Of every role the later time of the two.
local function later(a, b)
  local odd = (a & ODD | ABOVE_ODD) - (b & ODD) & ABOVE_ODD
  local even = (a & EVEN | ABOVE_EVEN) - (b & EVEN) & ABOVE_EVEN
  local from_a = odd - (odd >> BITS) | even - (even >> BITS)
  return a & from_a | b & ~from_a
end
M.later = later

--- The time of a role among those of an SM.
function M.time_of(own, role) return own >> (role - 1) * BITS & MASK end

--- The times of an SM when only that of one role is known.
function M.only(role, time) return time << (role - 1) * BITS end

local Clocks = {}
Clocks.__index = Clocks

--- Threads are numbered sm * 5 + role, role 1 to 5.
function M.new(sms)
  local self = setmetatable({ threads = sms * ROLES, bases = 0, base = {}, own = zeros(sms * ROLES) }, Clocks)
  self.zero = self:new_base()
  for thread = 1, self.threads do
    self.zero[thread] = 0
    self.base[thread] = self.zero
  end
  for name, method in pairs(Clocks) do self[name] = method end      -- found at once, for each of many calls
  return self
end

function Clocks:new_base()
  self.bases = self.bases + 1
  return { joins = {}, id = self.bases }
end

--- The least base that knows what a knows and what b knows.
function Clocks:join(a, b)
  if a == b then return a end
  local known = a.joins[b]
  if known then return known end
  local a_has_more, b_has_more = false, false
  for thread = 1, self.threads do
    local x, y = a[thread], b[thread]
    if x > y then a_has_more = true elseif y > x then b_has_more = true end
  end
  local result
  if not b_has_more then
    result = a
  elseif not a_has_more then
    result = b
  else
    result = self:new_base()
    for thread = 1, self.threads do
      local x, y = a[thread], b[thread]
      result[thread] = x > y and x or y
    end
  end
  a.joins[b], b.joins[a] = result, result
  return result
end

--- The thread begins task number `time`, which is at most MAX_TIME.
function Clocks:enter(sm, role, time)
  if role == OPTIONAL then self:learn(sm, OPTIONAL, HELP) end
  local own, thread = self.own, sm * ROLES + role
  own[thread] = own[thread] & OTHERS[role] | time << SHIFT[role]
end

--- Role `to` learns what role `from` of the same SM knows.
function Clocks:learn(sm, to, from)
  local a, b = sm * ROLES + to, sm * ROLES + from
  local bases, own = self.base, self.own
  if bases[a] ~= bases[b] then bases[a] = self:join(bases[a], bases[b]) end
  if own[a] ~= own[b] then own[a] = later(own[a], own[b]) end
end

--- What a thread knows now, to be learned later by `recall` on the same SM.
function Clocks:remember(sm, role)
  local thread = sm * ROLES + role
  return { base = self.base[thread], own = self.own[thread] }
end

function Clocks:recall(sm, role, memory)
  local thread = sm * ROLES + role
  self.base[thread] = self:join(self.base[thread], memory.base)
  self.own[thread] = later(self.own[thread], memory.own)
end

--- A role of an SM learns a base, a counter's say.
function Clocks:learn_base(sm, role, base)
  local thread = sm * ROLES + role
  local old = self.base[thread]
  if old ~= base then self.base[thread] = self:join(old, base) end
end

--- A counter's knowledge while its arrivals come in.
function Clocks:new_counter()
  return { shared = self.zero, arrived = {}, n = 0 }
end

function Clocks:arrive(counter, sm, role)
  local thread = sm * ROLES + (role == OPTIONAL and HELP or role)
  local base, own = self.base[thread], self.own[thread]
  if base ~= counter.shared then counter.shared = self:join(counter.shared, base) end
  if role == OPTIONAL then own = later(own, self.own[sm * ROLES + OPTIONAL] & ~OTHERS[OPTIONAL]) end
  local arrived = counter.arrived
  arrived[sm] = later(arrived[sm] or 0, own)
end

--- The base that who waits for all arrivals so far learns.
function Clocks:close(counter)
  local base = self:new_base()
  table.move(counter.shared, 1, self.threads, 1, base)
  -- Any order: an SM has threads of its own.
  for sm, own in pairs(counter.arrived) do
    for role = 1, ROLES do
      local thread, known = sm * ROLES + role, own >> SHIFT[role] & MASK
      if known > base[thread] then base[thread] = known end
    end
  end
  return base
end

-- What orders the roles of one task. Where there is always something to hand over, load comes before compute and
-- compute before store. A task that may find nothing to do hands nothing on, and its storers signal at once:
--   * an `every` task deals work by what only run time knows (attention: the chunks of live rows). One that claims work
--     hands an end mark to each storer, one of spread or owner has a tile, unless its op is `idle`
--   * a load that looks at SM-local data may find that nothing is to be streamed; where it claims, it ends with a mark
-- What such a task does read and write is ordered all the same, because then it had something to hand over: its stores
-- come after its compute, and its signal, if not its compute role's past, says that its own accesses are over.

-- True where compute of a task of the op always comes after its load.
local function load_feeds(op)
  if not op.roles.load or op.idle or op.tile == "every" and not op.claim then return false end
  for _, r in ipairs(op.reads) do
    if r.role == "load" and r.scope and not op.claim then return false end
  end
  return true
end

-- True where the signal of a task of the op always comes after its compute.
local function store_follows(op)
  return (op.roles.compute and op.roles.store and not op.idle and (op.tile ~= "every" or op.claim)) and true or false
end

--- The thread of one of an op's roles.
function M.role_of(op, role)
  return op.optional and OPTIONAL or M.ROLE[role]
end

--- What an op's roles do in a task, as numbers: roles, the list of them; wait, signal; compute, true where it has that
--- role; load_feeds, store_follows as above; also, a role that tells of its compute's accesses too, or nil.
function M.roles_of(op)
  local r = {
    roles = {}, wait = M.role_of(op, op.wait), signal = op.signal and M.role_of(op, op.signal),
    compute = op.roles.compute, hinted = op.hinted, load_feeds = load_feeds(op), store_follows = store_follows(op),
  }
  -- A store that does not follow compute of every task still follows what compute did.
  r.also = op.roles.compute and op.signal == "store" and not r.store_follows and M.ROLE.store or nil
  for _, name in ipairs(M.ROLES) do
    if op.roles[name] then r.roles[#r.roles + 1] = M.role_of(op, name) end
  end
  return r
end

--- Whether the step has signals or waits that order nothing.
function M.any_relaxed(g)
  for name in pairs(g.used) do
    local op = g.registry.by_name[name]
    if op.relaxed or op.hinted then return true end
  end
  return false
end

-- Groups: the accesses of one node to one buffer by one role, one member per task.

--- also: another role whose progress past the task says that the accesses are over, or nil. sms, times: of the node's
--- tasks; the lists may still grow. The regions, lo, lo + step, ... below hi, are set by who has them.
function M.new_group(node, role, writes, also, sms, times)
  return {
    node = node, role = role, writes = writes, also = also, sm = sms, time = times,
    lo = {}, hi = {}, step = {},
    unknown = {},               -- [base] = members that the base does not know, once asked for
  }
end

--- Makes room for the regions of n members.
function M.make_room(group, n)
  group.lo, group.hi, group.step = zeros(n), zeros(n), zeros(n)
end

local NOTHING = {}

--- The members of a group that a base does not know. The group must be complete.
function M.unknown(group, base)
  local list = group.unknown[base]
  if list then return list end
  local role, also, sms, times = group.role, group.also or group.role, group.sm, group.time
  for i = 1, #sms do
    local at, time = sms[i] * ROLES, times[i]
    if base[at + role] < time and base[at + also] < time then
      list = list or {}
      list[#list + 1] = i
    end
  end
  list = list or NOTHING
  group.unknown[base] = list
  return list
end

return M
