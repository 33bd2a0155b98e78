-- How long a step takes, without a GPU: the task lists played through on a model of the machine.
--
-- An SM has four clocks, one a role.  The producer streams the list's bytes in stages into the ring, at the rate that
-- the stages in flight allow, and never waits for another SM; a stage's place is free again when the consumers are
-- done with it.  Consumers take a stage when it is there; what a task waits for is there when the last of its tasks
-- has signalled and the news has gone round, which takes longer the more is in flight.  All times of a node come from
-- nodes before it, so one pass over the nodes in wave order is the whole simulation.
--
-- The machine is what specs/targets/ records of it, under `timing:`.  Experts are chosen alike, claimed work goes round
-- evenly; contention, clock rates and the instruction cache are left out.  So it ranks schedules, and is right to 4 %
-- for the model it was compared with (tests/gen/estimate.lua).
local abi = require("emit.abi")
local memory = require("memory")
local plan = require("plan")

local M = {}

local STAGE, PAGE_TOKENS = abi.STAGE_BYTES, abi.PAGE_TOKENS

-- The value at x of the line through the points (xs[i], ys[i]); outside them the nearest point's.
local function between(xs, ys, x)
  if x <= xs[1] then return ys[1] end
  for i = 2, #xs do
    if x <= xs[i] then
      return ys[i - 1] + (ys[i] - ys[i - 1]) * (x - xs[i - 1]) / (xs[i] - xs[i - 1])
    end
  end
  return ys[#ys]
end

-- Chunks of a row's pages, own_pages among them, as templates/prelude.cuh cuts them.
local function chunk_count(pages, split)
  local few = math.min((pages + split.pages_per_chunk - 1) // split.pages_per_chunk, split.chunks_min)
  return math.min(math.max(few, pages // split.pages_per_long_chunk), split.chunks_max)
end

-- Bytes of keys and values of one layer that each SM streams: chunk j of all rows and heads belongs to SM j mod sms.
local function kv_bytes(g, values, window, batch, context)
  local bytes, sms = {}, g.sms
  for sm = 0, sms - 1 do bytes[sm] = 0 end
  local tokens = math.min(context, window or math.maxinteger, values.max_context)
  local pages = math.max((tokens + PAGE_TOKENS - 1) // PAGE_TOKENS, 1)
  local split, head_page = g.model.schedule.split, 2 * PAGE_TOKENS * values.head_dim * 2
  local all = pages + split.own_pages
  local chunks = chunk_count(all, split)
  local function first(k) return math.min(all * k // chunks, pages) end
  local j = 0
  for _ = 1, batch * values.kv_heads do
    for k = 0, chunks - 1 do
      bytes[j % sms] = bytes[j % sms] + (first(k + 1) - first(k)) * head_page
      j = j + 1
    end
  end
  return bytes
end

-- Bytes of a node's weights that each SM streams where they depend on which experts are chosen; nil where they do not.
local function expert_bytes(g, node, distinct)
  local array
  for _, from in pairs(node.weights) do
    if g.array[from.array].experts > 0 then array = g.array[from.array] end
  end
  if not array then return nil end
  local tile, tiles, bytes = array.tile_kib * memory.KIB, array.expert_kib // array.tile_kib, {}
  if node.spec.tile == "owner" then
    for _, task in ipairs(node.tasks) do bytes[task.sm] = tile * distinct end
    return bytes
  end
  local all = math.floor(distinct * tiles + 0.5)
  for _, task in ipairs(node.tasks) do
    local rank = task.fields.rank or task.sm
    bytes[task.sm] = (all // g.sms + (rank < all % g.sms and 1 or 0)) * tile
  end
  return bytes
end

-- What a task streams, by SM: a function of the task.
local function bytes_of(g, values, batch, context)
  local kv, cache = {}, {}
  for kind, window in pairs({ full = false, sliding = values.window }) do
    kv[kind] = kv_bytes(g, values, window or nil, batch, context)
  end
  local distinct = values.experts and plan.distinct_experts(values.experts, values.experts_per_token, batch)
  local env = { sms = g.sms, columns = g.columns }
  return function(node)
    local op = node.spec
    if not op.roles.load then return nil end
    if next(node.weights) == nil then
      if node.fields.kv_layer == nil then return nil end
      local by_sm = kv[node.fields.sliding == 1 and "sliding" or "full"]
      return function(task) return by_sm[task.sm] end
    end
    local by_sm = expert_bytes(g, node, distinct)
    if by_sm then return function(task) return by_sm[task.sm] end end
    local params = g.params[node.op]
    return function(task)
      local key = task.fields.tiles or 0
      local list = cache[node.op]
      if not list then list = {}; cache[node.op] = list end
      if not list[key] then
        list[key] = op.eval_cost(setmetatable({ sm = task.sm, sms = env.sms, columns = env.columns }, {
          __index = function(_, name)
            local value = task.fields[name]
            if value == nil then value = params[name] end
            return value
          end }))
      end
      return list[key]
    end
  end
end

-- What the target records, at this number of columns and cap.  Seconds.
local function machine(g, batch, cap)
  local timing, sms = g.model.target.timing, g.sms
  local full = g.model.target.read_bytes_per_s / sms
  local function at(stages)
    local kib = stages * STAGE // 1024
    local one, eight = between(timing.in_flight_kib, timing.gather_ns, kib),
      between(timing.in_flight_kib, timing.gather8_ns, kib)
    return {
      rate = full * between(timing.in_flight_kib, timing.read_share, kib),
      handoff = (one + (eight - one) * (batch - 1) / 7) * 1e-9,
    }
  end
  -- While consumers wait the ring fills, and then nothing is in flight that a release would have to wait for.  Counted
  -- for the deepest ring, whatever the schedule's: that a shallow one makes releases cheap nobody has measured.
  local function bounded(stages)
    local loaded = at(stages)
    loaded.handoff = math.min(loaded.handoff, at(0).handoff + abi.MOST_RING_STAGES * STAGE / loaded.rate)
    return loaded
  end
  return {
    plain = bounded(cap), eased = bounded(math.max(cap - 1, 1)), consume = full * timing.consume_rate,
    task = timing.task_ns * 1e-9, launch = timing.launch_ns * 1e-9,
  }
end

-- For each node, whether the SMs load for an eased op when it signals: the next one that loads.
local function eased_after(g)
  local eased, now = {}, false
  for id = #g.nodes, 1, -1 do
    eased[id] = now
    local op = g.nodes[id].spec
    if op.roles.load then now = op.eased or false end
  end
  return eased
end

-- The regions of an op that stay on an SM: read and written, by role.
local function local_regions(op)
  local reads, writes = {}, {}
  for _, r in ipairs(op.reads) do
    if r.scope == "sm" then reads[#reads + 1] = { name = r.name, role = r.role } end
  end
  for _, r in ipairs(op.writes) do
    if r.scope == "sm" then writes[#writes + 1] = { name = r.name, role = r.role } end
  end
  return reads, writes
end

--- Requires: a graph after sync. Seconds that a step with `batch` live columns, each after `context` tokens, takes, and
--- { bytes, stall = seconds that consumers waited for others on the mean SM }. opts.in_flight, opts.ring_stages: in
--- place of the schedule's. opts.record(node, sm, role, from, to, waits): called for what each role does of a task, and
--- with `waits` for its waiting before it.
function M.step(g, batch, context, opts)
  opts = opts or {}
  local schedule, values = g.model.schedule, g.model.family_module.values(g.model)
  local cap, ring = opts.in_flight or schedule.in_flight[batch], (opts.ring_stages or schedule.ring_stages) * STAGE
  local m, of, eased = machine(g, batch, cap), bytes_of(g, values, batch, context), eased_after(g)
  local clock, ready, sm_state, total, stalled = {}, {}, {}, 0, 0
  for _, role in ipairs({ "load", "compute", "store", "help" }) do
    clock[role] = {}
    for sm = 0, g.sms - 1 do clock[role][sm] = m.launch end
  end
  for sm = 0, g.sms - 1 do sm_state[sm] = { first = 1, last = 0, used = 0, size = {}, free = {}, done = {} } end
  local load, compute, record = clock.load, clock.compute, opts.record
  local last = 0
  for id, node in ipairs(g.nodes) do
    local op = node.spec
    local bytes, asleep = of(node), op.optional
    local rate = (op.eased and m.eased or m.plain).rate
    local reads, writes = local_regions(op)
    local waits_in, latest = op.wait, 0
    for _, task in ipairs(node.tasks) do
      local sm = task.sm
      local s = sm_state[sm]
      local waited = 0
      for _, wait in ipairs(task.waits) do waited = math.max(waited, ready[wait.node.id] or 0) end
      for _, r in ipairs(reads) do
        local t = s.done[r.name] or 0
        if t > clock[r.role][sm] then clock[r.role][sm] = t end
      end
      if waits_in and not asleep then
        local before = clock[waits_in][sm]
        if waited > before then
          if waits_in == "compute" then stalled = stalled + waited - before end
          if record then record(node, sm, waits_in, before, waited, true) end
          clock[waits_in][sm] = waited
        end
      end
      local n = bytes and bytes(task) or 0
      local loads, computes = load[sm], compute[sm]
      if n > 0 then
        total = total + n
        local piece = n > 64 * STAGE and 2 * STAGE or STAGE
        local at, done, size, free = load[sm], compute[sm], s.size, s.free
        while n > 0 do
          local b = n < piece and n or piece
          n = n - b
          local used, first = s.used + b, s.first
          while used > ring do          -- the oldest stages go first
            if free[first] > at then at = free[first] end
            used = used - size[first]
            size[first], free[first] = nil, nil
            first = first + 1
          end
          at = at + b / rate
          if at > done then done = at end
          done = done + b / m.consume
          s.last = s.last + 1
          size[s.last], free[s.last], s.used, s.first = b, done, used, first
        end
        load[sm], compute[sm] = at, done
      end
      local ends
      if op.roles.compute or op.roles.load then compute[sm] = compute[sm] + m.task end
      if record and load[sm] > loads then record(node, sm, "load", loads, load[sm], false) end
      if record and compute[sm] > computes then record(node, sm, "compute", computes, compute[sm], false) end
      if op.roles.store then
        ends = math.max(clock.store[sm], compute[sm]) + m.task
        clock.store[sm] = ends
      elseif op.roles.help then
        ends = clock.help[sm] + (asleep and 0 or m.task)
        clock.help[sm] = ends
      else
        ends = compute[sm]
      end
      if record and op.roles.store then record(node, sm, "store", ends - m.task, ends, false) end
      if record and op.roles.help and not op.roles.store and not asleep then
        record(node, sm, "help", ends - m.task, ends, false)
      end
      for _, r in ipairs(writes) do s.done[r.name] = clock[r.role][sm] end
      if ends > latest then latest = ends end
    end
    ready[id] = latest + (asleep and m.task or (eased[id] and m.eased or m.plain).handoff)
    if latest > last then last = latest end
  end
  return last, { bytes = total, stall = stalled / g.sms }
end

--- Whether the target records what an estimate needs.
function M.possible(target)
  return target.timing ~= nil and target.timing.task_ns > 0
end

--- What plan --estimate prints: the step of each batch, and what another cap or depth would do.
function M.text(g)
  local lines, schedule, context = {}, g.model.schedule, math.min(plan.CONTEXT, g.model.shape.max_context)
  local shallower = math.max(schedule.ring_stages - 2, abi.LEAST_RING_STAGES)
  local function line(fmt, ...) lines[#lines + 1] = fmt:format(...) end
  line("Estimated ms a step, %d tokens in each row, by the timing of target %s", context, g.model.target.name)
  line("")
  line("rows    as scheduled   waiting for others   one stage less in flight   one more   ring of %d stages",
    shallower)
  local b = 1
  while b <= g.columns do
    local cap = schedule.in_flight[b]
    local function ms(opts)
      if opts.in_flight and (opts.in_flight < 1 or opts.in_flight > schedule.ring_stages) then return "-" end
      return ("%.3f"):format(M.step(g, b, context, opts) * 1e3)
    end
    local seconds, detail = M.step(g, b, context)
    line("%4d %15s %20s %26s %10s %19s", b, ("%.3f"):format(seconds * 1e3), ("%.3f"):format(detail.stall * 1e3),
      ms({ in_flight = cap - 1 }), ms({ in_flight = cap + 1 }), ms({ ring_stages = shallower }))
    b = b < g.columns and math.min(2 * b, g.columns) or b + 1
  end
  return table.concat(lines, "\n") .. "\n"
end

return M
