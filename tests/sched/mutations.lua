-- Random mistakes in small lists: whatever a machine with random interleavings shows to go wrong, the proof must have
-- refused. NMK_MUTATIONS and NMK_SEED change how many and which.
package.path = "tests/sched/?.lua;" .. package.path
local helper = require("helper")
local machine = require("helper_machine")
local check = require("check")

local SMALL = {
  sms = 3,
  shape = { layers = 4, hidden = 32, heads = 2, kv_heads = 1, head_dim = 16, dense_ff = 16, experts = 16,
            experts_per_token = 2, expert_ff = 16, vocab = 64 },
  schedule = { columns = 2, split = { chunks_max = 4 } },
}
local MUTATIONS = tonumber(os.getenv("NMK_MUTATIONS")) or 300
local RUNS = 20
math.randomseed(tonumber(os.getenv("NMK_SEED")) or 1)

-- Seven tiles of owners on three SMs: three passes, the last of which one SM has.
local HIDDEN = { [1] = 32, [3] = 112 }

local function build(reuse, passes, attention, launch)
  SMALL.launch = launch
  SMALL.schedule.claim = { up = "queue", attention = attention }
  SMALL.schedule.reuse_buffers, SMALL.shape.hidden = reuse, HIDDEN[passes]
  local g = helper.build("nmc-toy", SMALL)
  return g, helper.words(g)
end

local change = {}

local function random_task(b)
  local sm = math.random(0, b.g.sms - 1)
  return sm, math.random(0, b:tasks(sm) - 1)
end

-- A task that waits.
local function random_waiter(b)
  while true do
    local sm, task = random_task(b)
    if b:get(sm, task, "wait_a") ~= -1 then return sm, task end
  end
end

function change.lose(b)
  local sm, task = random_waiter(b)
  b:lose(sm, task)
end

function change.lose_many(b)
  for _ = 1, math.random(2, 8) do change.lose(b) end
end

function change.threshold(b)
  local sm, task = random_waiter(b)
  local arrivals = b:get(sm, task, "arrivals_a")
  b:set(sm, task, "arrivals_a", math.max(0, arrivals + math.random(-3, 2)))
end

function change.counter(b)
  local sm, task = random_waiter(b)
  b:set(sm, task, "wait_a", math.random(0, b.g.counters))
end

function change.extra_wait(b)
  local sm, task = random_task(b)
  local from, other = random_waiter(b)
  local slot = b:get(sm, task, "wait_a") == -1 and "a" or "b"
  b:set(sm, task, "wait_" .. slot, b:get(from, other, "wait_a"))
  b:set(sm, task, "arrivals_" .. slot, b:get(from, other, "arrivals_a"))
end

function change.signal(b)
  local sm, task = random_task(b)
  b:set(sm, task, "signal", math.random(-1, b.g.counters - 1))
end

function change.swap(b)
  local sm, task = random_task(b)
  local other = math.min(b:tasks(sm) - 1, task + math.random(3))
  b:swap(sm, task, other)
end

function change.remove(b) b:remove(random_task(b)) end

function change.twice(b) b:repeat_task(random_task(b)) end

function change.instance(b)
  local ops = { "route", "expert_up", "expert_down" }
  local sm = math.random(0, 1)                                      -- which have a tile of every owner op's first pass
  local task = b:find(sm, ("layer%d.%s"):format(math.random(1, 3), ops[math.random(3)]))
  b:set(sm, task, "local", math.max(0, b:get(sm, task, "local") + math.random(-2, 2)))
end

-- What can be changed in lists of a launch: a prefill one keeps nothing on an SM.
local function changes(launch)
  local names = {}
  for name in pairs(change) do names[#names + 1] = not (launch and name == "instance") and name or nil end
  table.sort(names)
  return names
end

-- What the machine finds in so many runs, or nil.
local function shown(g, words)
  local m = machine.new(g, words)
  for i = 1, RUNS do
    local wrong = machine.run(m, i % 2 == 0)
    if wrong then return wrong end
  end
end

local CASES = { { true, 1, "static" }, { false, 1, "static" }, { true, 3, "static" }, { true, 1, "queue" },
  { true, 1, "static", "prefill" } }
for _, case in ipairs(CASES) do
  local reuse, passes, attention, launch = table.unpack(case)
  local g, words = build(reuse, passes, attention, launch)
  local names = changes(launch)
  local what = launch or (reuse and "buffers reused" or "a buffer for each layer") ..
    (passes > 1 and ", owners in passes" or "") .. (attention == "queue" and ", attention claimed" or "")
  helper.proved("small lists, " .. what, g, words)
  local m = machine.new(g, words)
  for _, asleep in ipairs({ false, true }) do
    local wrong
    for _ = 1, 200 do wrong = wrong or machine.run(m, asleep) end
    helper.ok(("200 random runs of intact lists, optional tasks %s, %s"):format(asleep and "asleep" or "awake", what),
      not wrong, wrong)
  end

  local refused, raced, missed = {}, {}, {}
  for _, name in ipairs(names) do refused[name], raced[name] = 0, 0 end
  local each = MUTATIONS // (2 * #names)
  for _, name in ipairs(names) do
    for i = 1, each do
      local b = helper.broken(g, words)
      change[name](b)
      local good, messages = pcall(check.prove, g, b.words)
      if not good then
        missed[#missed + 1] = ("%s %d: the check itself failed: %s"):format(name, i, messages)
      else
        local race = shown(g, b.words)
        if #messages > 0 then refused[name] = refused[name] + 1 end
        if race then raced[name] = raced[name] + 1 end
        if race and #messages == 0 then missed[#missed + 1] = ("%s %d: %s"):format(name, i, race) end
      end
    end
  end
  for _, name in ipairs(names) do
    print(("# %-12s %3d changed, %3d refused, %3d seen to go wrong"):format(name, each, refused[name], raced[name]))
  end
  helper.ok("what goes wrong is refused, " .. what, #missed == 0, table.concat(missed, "; "))
  local any = 0
  for _, name in ipairs(names) do any = any + raced[name] end
  helper.ok("the machine sees mistakes, " .. what, any > MUTATIONS // 8, any)
end
helper.done()
