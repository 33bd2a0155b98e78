-- A machine that runs encoded lists in random interleavings and tells when somebody sees the wrong data or nobody can
-- go on. It knows nothing of clocks: every unit of a buffer remembers which node wrote it last and which nodes' tasks
-- have added to that, and a reader compares both with what the order of the nodes says. Roles of an SM run as far apart
-- as they can: what the kernel's bounded queues forbid is allowed here. The two store warps share a task's work or one
-- has all of it; one without work signals at once, and so do both where an `every` task that claims nothing finds
-- nothing to do. What such a task does not write nobody reads.
-- A run is of one of two worlds: optional tasks are all awake, or all asleep. Asleep they only signal, and the order of
-- the nodes is that of the others.
local ops = require("ops")
local M = {}

local WORDS, AT = ops.WORDS, ops.AT

-- What is in one unit of a buffer: the node that wrote it last, 0 for nobody, and how many tasks of which node have
-- added to that since.
local NOTHING = { writer = 0 }

local function written(id) return { writer = id } end

-- value itself stays: others may have seen it.
local function added(value, id)
  local sum = {}
  for key, n in pairs(value) do sum[key] = n end
  sum[id] = (sum[id] or 0) + 1
  return sum
end

local function same(a, b)
  for key, n in pairs(a) do
    if b[key] ~= n then return false end
  end
  for key in pairs(b) do
    if not a[key] then return false end
  end
  return true
end

local function describe(value)
  local ids, text = {}, ("node %d left it"):format(value.writer)
  for key in pairs(value) do ids[#ids + 1] = key ~= "writer" and key or nil end
  table.sort(ids)
  for _, id in ipairs(ids) do text = ("%s, and %d tasks of node %d added"):format(text, value[id], id) end
  return text
end

-- Calls f(buffer's name, unit) for what one access of a task of the graph touches.
local function each_unit(g, task, r, f)
  local buffer = g.buffer[task.node.bind[r.name]]
  if r.claim then return end
  local env = { sm = task.sm, sms = g.sms, columns = g.columns }
  for name, value in pairs(g.params[task.node.op]) do env[name] = value end
  for _, field in ipairs(task.node.spec.task) do env[field.name] = task.fields[field.name] end
  for unit = r.eval.lo(env), r.eval.hi(env) - 1, r.eval.step(env) do f(buffer.name, unit) end
end

-- What the order of the nodes says. Of the units that a node reads and of those that are left at the end,
-- { [node id or "end"] = { [buffer] = { [unit] = value } } }; of SM-local data, { [node id] = { [name] = { [sm] = node
-- id } } }: an owner that is not on an SM leaves what is there.
local function meaning(g, asleep)
  local units, expected, writer, before = {}, {}, {}, {}
  for _, buffer in ipairs(g.buffers) do units[buffer.name] = {} end
  for _, node in ipairs(g.nodes) do
    local spec, seen, here = node.spec, {}, {}
    expected[node.id], before[node.id] = seen, here
    if not (asleep and spec.optional) then
      for _, r in ipairs(spec.reads) do
        if r.scope then here[r.name] = table.move(writer[r.name] or {}, 0, g.sms - 1, 0, {}) end
        for _, task in ipairs(r.global and node.tasks or {}) do
          each_unit(g, task, r, function(name, unit)
            seen[name] = seen[name] or {}
            seen[name][unit] = units[name][unit] or NOTHING
          end)
        end
      end
      for _, r in ipairs(spec.writes) do
        writer[r.name] = writer[r.name] or {}
        for sm = 0, r.scope and (spec.tile == "owner" and node.tiles or g.sms) - 1 or -1 do
          writer[r.name][sm] = node.id
        end
        for _, task in ipairs(r.global and node.tasks or {}) do
          each_unit(g, task, r, function(name, unit)
            units[name][unit] = r.adds and added(units[name][unit] or NOTHING, node.id) or written(node.id)
          end)
        end
        for unit = 0, r.claim and g.buffer[node.bind[r.name]].extent - 1 or -1 do
          units[node.bind[r.name]][unit] = written(node.id)
        end
      end
    end
  end
  expected["end"] = units
  return expected, before
end

local function decode(g, words)
  local nodes = {}
  for _, node in ipairs(g.nodes) do nodes[node.id - 1] = node end
  local buffers = {}
  for _, buffer in ipairs(g.buffers) do buffers[buffer.offset128] = buffer end
  local lists = {}
  for sm = 0, g.sms - 1 do
    lists[sm] = {}
    for base = 0, #words[sm] - 1, WORDS do
      local node = nodes[words[sm][base + AT.node]]
      local env = { sm = sm, sms = g.sms, columns = g.columns }
      for name, value in pairs(g.params[node.op]) do env[name] = value end
      for _, field in ipairs(node.spec.fields) do env[field.name] = words[sm][base + field.word + 1] end
      local task = {
        node = node, sm = sm, instance = words[sm][base + AT["local"]], signal = words[sm][base + AT.signal],
        waits = {}, uses = {},
      }
      for _, w in ipairs({ "a", "b" }) do
        local counter = words[sm][base + AT["wait_" .. w]]
        if counter ~= -1 then
          task.waits[#task.waits + 1] = { counter = counter, arrivals = words[sm][base + AT["arrivals_" .. w]] }
        end
      end
      for _, way in ipairs({ "reads", "writes" }) do
        for _, r in ipairs(node.spec[way]) do
          if not r.launch then
            local use = { role = r.role, name = r.name, writes = way == "writes", scope = r.scope, claim = r.claim,
                          adds = r.adds }
            if r.global then
              use.buffer = buffers[env[r.name]]
              use.name = use.buffer.name
              if not r.claim then use.lo, use.hi, use.step = r.eval.lo(env), r.eval.hi(env), r.eval.step(env) end
            end
            task.uses[#task.uses + 1] = use
          end
        end
      end
      lists[sm][#lists[sm] + 1] = task
    end
  end
  return lists
end

-- The steps of one thread: { kind, task, ... } in order.
local function program(list, role, warp, shared, asleep)
  local steps = {}
  local function step(kind, task, more)
    steps[#steps + 1] = { kind = kind, task = task, more = more }
  end
  for _, task in ipairs(list) do
    local spec = task.node.spec
    if spec.roles[role] and asleep and spec.optional then
      if spec.signal == role and task.signal ~= -1 then step("signal", task) end
    elseif spec.roles[role] then
      for _, use in ipairs(task.uses) do
        if use.scope and shared[use.name] and use.role == role and not use.writes then step("route", task, use) end
      end
      if role == "compute" and spec.roles.load then step("after", task, "load") end
      if role == "store" and spec.roles.compute then step("after", task, "compute") end
      if role == "store" and spec.roles.load and not spec.roles.compute then step("after", task, "load") end
      if spec.wait == role then
        for _, wait in ipairs(task.waits) do step("wait", task, wait) end
      end
      for _, writes in ipairs({ false, true }) do
        for _, use in ipairs(task.uses) do
          if use.role == role and use.writes == writes then step("use", task, use) end
        end
      end
      if spec.signal == role and task.signal ~= -1 then step("signal", task) end
      step("done", task, role .. warp)
    end
  end
  return steps
end

--- A machine for lists; run it as often as you like.
function M.new(g, words)
  local self = { g = g, lists = decode(g, words), shared = ops.shared_buffers(g.registry) }
  self.worlds = {}
  for _, asleep in ipairs({ false, true }) do
    local expected, before = meaning(g, asleep)
    self.worlds[asleep] = { expected = expected, before = before, threads = {} }
    M.add_threads(self, self.worlds[asleep].threads, asleep)
  end
  return self
end

function M.add_threads(self, threads, asleep)
  local g = self.g
  for sm = 0, g.sms - 1 do
    for _, role in ipairs({ "load", "compute", "store", "store", "help" }) do
      local warp = role == "store" and #threads % 2 or 0
      threads[#threads + 1] = { sm = sm, role = role, warp = warp,
                                steps = program(self.lists[sm], role, warp, self.shared, asleep) }
    end
  end
end

-- How a task goes in one run: which store warps have work, whether compute has something to wait for from load.
local function luck(task)
  local op = task.node.spec
  local how = { idle = false, fed = true, share = { [0] = true, true } }
  if op.roles.compute and op.roles.store and not op.claim then
    local throw = math.random(op.tile == "every" and 4 or 3)
    if throw < 3 then how.share[throw % 2] = false end
    if throw == 4 then how.idle, how.share = true, { [0] = false, false } end
  end
  for _, r in ipairs(op.reads) do
    if r.role == "load" and r.scope and not op.claim then how.fed = math.random() < 0.5 end
  end
  if op.tile == "every" and not op.claim then how.fed = not how.idle end
  return how
end

--- One random run with optional tasks asleep or awake. Returns nil, or what went wrong.
function M.run(self, asleep)
  local g, world = self.g, self.worlds[asleep]
  local counters, units, locals, finished, claimed = {}, {}, {}, {}, {}
  local wrong
  local how, void = {}, {}
  for sm = 0, g.sms - 1 do
    for _, task in ipairs(self.lists[sm]) do
      how[task] = luck(task)
      for _, use in ipairs(how[task].idle and task.uses or {}) do
        for unit = use.lo or 0, use.writes and not use.scope and use.hi - 1 or -1, use.step or 1 do
          void[("%d,%s,%d"):format(task.node.id, use.name, unit)] = true
        end
      end
    end
  end
  for sm = 0, g.sms - 1 do locals[sm] = { copies = {}, completed = { [0] = 0, 0 }, writer = {} } end
  for _, buffer in ipairs(g.buffers) do units[buffer] = {} end
  -- Who claims what is settled by chance: any SM that has a task of the node. Of each use of a task its units.
  local claims = {}
  for sm = 0, g.sms - 1 do
    for _, task in ipairs(self.lists[sm]) do
      for i, use in ipairs(task.uses) do
        if use.claim then
          local uses = claimed[task.node] or {}
          claimed[task.node], claims[use] = uses, {}
          uses[i] = uses[i] or {}
          table.insert(uses[i], use)
        end
      end
    end
  end
  for _, node in ipairs(g.nodes) do
    for i = 1, claimed[node] and #node.spec.reads + #node.spec.writes or 0 do
      local uses = claimed[node][i]
      for unit = 0, uses and uses[1].buffer.extent - 1 or -1 do
        table.insert(claims[uses[math.random(#uses)]], unit)
      end
    end
  end

  local function see(thread, use, task)
    local name = ("%s on SM %d"):format(task.node.name, task.sm)
    local expected = world.expected[task.node.id][use.name]
    local function touch(unit)
      local state = units[use.buffer]
      local found, want = state[unit] or NOTHING, expected and expected[unit] or NOTHING
      if use.writes and use.adds then
        state[unit] = added(found, task.node.id)
      elseif use.writes then
        state[unit] = written(task.node.id)
      elseif not same(found, want) and not void[("%d,%s,%d"):format(want.writer, use.name, unit)] then
        wrong = wrong or ("%s reads unit %d of %s as %s"):format(name, unit, use.name, describe(found))
      end
    end
    if use.scope then
      local here = locals[task.sm]
      local shared = self.shared[use.name]
      if use.writes then
        if shared then
          here.copies[task.instance & 1] = task.node.id
          here.completed[task.instance & 1] = here.completed[task.instance & 1] + 1
        else
          here.writer[use.name] = task.node.id
        end
      else
        local found = shared and here.copies[task.instance & 1] or not shared and here.writer[use.name] or 0
        if found ~= (world.before[task.node.id][use.name][task.sm] or 0) then
          wrong = wrong or ("%s reads %s as node %d left it"):format(name, use.name, found)
        end
      end
    elseif use.claim then
      for _, unit in ipairs(claims[use]) do
        if unit % 2 == thread.warp then touch(unit) end
      end
    elseif not how[task].idle then
      local halves = thread.role == "store" and how[task].share[0] and how[task].share[1]
      for unit = use.lo, use.hi - 1, use.step do
        if not halves or unit // use.step % 2 == thread.warp then touch(unit) end
      end
    end
  end

  -- Does the thread's next step if it can.
  local function go(thread)
    local step = thread.steps[thread.at]
    local task, more, kind = step.task, step.more, step.kind
    if thread.role == "store" and not how[task].share[thread.warp] and (kind == "after" or kind == "use") then
      kind = "nothing"
    end
    if kind == "after" and more == "load" and not how[task].fed then kind = "nothing" end
    if kind == "nothing" then
      thread.at = thread.at + 1
      return true
    end
    if kind == "after" then
      local done = finished[task]
      if not (done and done[more .. 0]) then return false end
    elseif kind == "wait" then
      if (counters[more.counter] or 0) < more.arrivals then return false end
    elseif kind == "route" then
      -- A barrier tells phases apart by one bit only.
      if locals[task.sm].completed[task.instance & 1] & 1 == task.instance >> 1 & 1 then return false end
    elseif kind == "use" then
      see(thread, more, task)
    elseif kind == "signal" then
      counters[task.signal] = (counters[task.signal] or 0) + 1
    else
      finished[task] = finished[task] or {}
      finished[task][more] = true
    end
    thread.at = thread.at + 1
    return true
  end

  local running = {}
  for _, thread in ipairs(world.threads) do
    thread.at, thread.slow = 1, math.random() ^ 3
    if thread.steps[1] then running[#running + 1] = thread end
  end
  local idle = 0
  while #running > 0 and not wrong do
    local i = math.random(#running)
    local thread = running[i]
    -- Some threads are much slower than others in one run; nobody who could go on is passed over for ever.
    if math.random() > thread.slow or idle > 0 then
      local moved = 0
      local burst = math.random(12)
      while moved < burst and thread.steps[thread.at] and go(thread) do moved = moved + 1 end
      idle = moved > 0 and 0 or idle + 1
      if not thread.steps[thread.at] then
        running[i] = running[#running]
        running[#running] = nil
        idle = 0
      end
      if idle > 20 * #running then
        local stuck = true
        for n = #running, 1, -1 do
          if go(running[n]) then
            stuck = false
            if not running[n].steps[running[n].at] then table.remove(running, n) end
            break
          end
        end
        if stuck then return "nobody can go on" end
        idle = 0
      end
    end
  end
  if wrong then return wrong end
  for _, buffer in ipairs(g.buffers) do
    for unit = 0, buffer.extent - 1 do
      local found, want = units[buffer][unit], world.expected["end"][buffer.name][unit] or NOTHING
      if found and not same(found, want) and not void[("%d,%s,%d"):format(want.writer, buffer.name, unit)] then
        return ("unit %d of %s in the end: %s"):format(unit, buffer.name, describe(found))
      end
    end
  end
end

return M
