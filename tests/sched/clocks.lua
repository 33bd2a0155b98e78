-- The times of an SM's roles in one integer against five plain numbers.
package.path = "tests/sched/?.lua;" .. package.path
local helper = require("helper")
local hb = require("hb")

local function pack(times)
  local own = 0
  for role, time in ipairs(times) do own = own | hb.only(role, time) end
  return own
end

local function unpack_times(own)
  local times = {}
  for role = 1, #hb.ROLES do times[role] = hb.time_of(own, role) end
  return times
end

-- Times at the ends of the range are as frequent as all others.
local ENDS = { 0, 1, hb.MAX_TIME >> 1, (hb.MAX_TIME >> 1) + 1, hb.MAX_TIME - 1, hb.MAX_TIME }
local function some_times()
  local times = {}
  for role = 1, #hb.ROLES do
    times[role] = math.random(2) == 1 and ENDS[math.random(#ENDS)] or math.random(0, hb.MAX_TIME)
  end
  return times
end

math.randomseed(1)
local kept, joined = true, true
for _ = 1, 20000 do
  local a, b = some_times(), some_times()
  local got, back = unpack_times(hb.later(pack(a), pack(b))), unpack_times(pack(a))
  for role = 1, #hb.ROLES do
    kept = kept and back[role] == a[role]
    joined = joined and got[role] == math.max(a[role], b[role])
  end
end
helper.ok("every role's time is kept", kept, "it is not")
helper.ok("of two the later time of every role", joined, "another one")

-- A thread that begins a task, learns from another role and from memory.
local clocks = hb.new(2)
local LOAD, COMPUTE, STORE = hb.ROLE.load, hb.ROLE.compute, hb.ROLE.store
local function knows(sm, role, of) return hb.time_of(clocks.own[sm * #hb.ROLES + role], of) end
clocks:enter(1, LOAD, hb.MAX_TIME)
clocks:enter(1, COMPUTE, 7)
local before = clocks:remember(1, COMPUTE)
clocks:enter(1, COMPUTE, 9)
clocks:learn(1, COMPUTE, LOAD)
clocks:recall(1, STORE, before)
helper.ok("a role knows what it learned", knows(1, COMPUTE, LOAD) == hb.MAX_TIME and knows(1, COMPUTE, COMPUTE) == 9,
  "it does not")
helper.ok("memory does not change", knows(1, STORE, COMPUTE) == 7 and knows(1, STORE, LOAD) == 0, "it did")
local counter = clocks:new_counter()
clocks:arrive(counter, 1, STORE)
clocks:arrive(counter, 1, COMPUTE)
local base = clocks:close(counter)
local thread = #hb.ROLES
helper.ok("a counter tells what all knew who arrived", base[thread + LOAD] == hb.MAX_TIME and
  base[thread + COMPUTE] == 9 and base[thread + STORE] == 0 and base[COMPUTE] == 0, "it does not")
helper.done()
