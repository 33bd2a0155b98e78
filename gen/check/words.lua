-- The part of the proof that needs no clocks: every word against the graph, all work once, everything fits.
local abi = require("emit.abi")
local handing = require("handing")
local hb = require("hb")
local memory = require("memory")
local ops = require("ops")
local zeros = require("zeros")
local M = {}

local MAX_LIST = hb.MAX_TIME    -- hang records have as many bits for a task as clocks

local UNIT, KIB = memory.UNIT, memory.KIB
local WORDS = ops.WORDS
local W_OPCODE, W_NODE, W_SIGNAL, W_WAIT = ops.AT.opcode, ops.AT.node, ops.AT.signal, ops.AT.wait_a

function M:budget()
  local g, target = self.g, self.g.model.target
  local stages = g.model.schedule.ring_stages
  local shared = stages * abi.STAGE_BYTES + abi.shared_rest_bytes(g.model)
  if shared > target.smem_bytes_per_block then
    self:report(nil, "shared memory: %d ring stages and the rest need %d bytes, a block of the target has %d", stages,
      shared, target.smem_bytes_per_block)
  end
  local registers = 0
  for _, part in ipairs(abi.WARPS) do registers = registers + part.count * abi.LANES * part.registers end
  if registers > target.regs then
    self:report(nil, "registers: a block needs %d, an SM of the target has %d", registers, target.regs)
  end
  self.stats.shared_bytes, self.stats.registers = shared, registers
  self:activation_arena()
  self:weight_arena()
end

function M:activation_arena()
  local g, last = self.g, nil
  local buffers = table.move(g.buffers, 1, #g.buffers, 1, {})
  table.sort(buffers, function(a, b) return a.offset128 < b.offset128 end)
  for _, buffer in ipairs(buffers) do
    local from = buffer.offset128 * UNIT
    if last and last.offset128 * UNIT + last.bytes > from then
      self:report(nil, "activation arena: buffers %s and %s overlap", last.name, buffer.name)
    end
    if from < 0 or from + buffer.bytes > g.arena_bytes then
      self:report(nil, "activation arena: buffer %s ends at byte %d of %d", buffer.name, from + buffer.bytes,
        g.arena_bytes)
    end
    local in_exchange = from >= g.exchange_at and from + buffer.bytes <= g.exchange_at + g.exchange_bytes
    if buffer.posted and not in_exchange then
      self:report(nil, "activation arena: buffer %s, of which there are two copies, is not in the first", buffer.name)
    elseif not buffer.posted and from + buffer.bytes > g.exchange_at then
      self:report(nil, "activation arena: buffer %s is among those of which there are two copies", buffer.name)
    end
    last = buffer
  end
  if g.exchange_at + 2 * g.exchange_bytes > g.arena_bytes then
    self:report(nil, "activation arena: two copies of %d bytes at byte %d end behind its %d", g.exchange_bytes,
      g.exchange_at, g.arena_bytes)
  end
end

function M:weight_arena()
  local g, at, before = self.g, 0, "the start"
  for _, array in ipairs(g.arrays) do
    local bytes = array.layout == "vector" and array.cols * 2 or array.rows * memory.packed_cols(array.cols) * 2
    local layer_kib = (bytes + KIB - 1) // KIB * math.max(array.experts, 1)
    if array.kib < at or array.layer_kib < layer_kib then
      self:report(nil, "weight arena: array %s at KiB %d overlaps %s", array.name, array.kib, before)
    end
    at, before = array.kib + array.layers * array.layer_kib, array.name
    if at > g.weights_kib or at > 0x7fffffff then
      self:report(nil, "weight arena: array %s ends at KiB %d of %d", array.name, at, g.weights_kib)
    end
  end
end

-- One word that differs from what the graph says.
function M:wrong_word(plan, e, value, sm, time)
  local node, name = plan.node, self:name(sm, time)
  local from = node.weights[e.name]
  if e.buffer then
    local buffer = self.buffer_at[value]
    local where = buffer and "buffer " .. buffer.name or ("at %d x 128 bytes, where no buffer starts"):format(value)
    self:report(nil, "%s: %s is %s, the graph says %s", name, e.buffer, where, node.bind[e.buffer])
  elseif from then
    self:report(nil, "%s: weights at KiB %d are out of range: array %s of layer %d starts at KiB %d", name, value,
      from.array, from.layer, e.value)
  else
    self:report(nil, "%s: field %s is %d, the graph says %s", name, e.name, value, e.value)
  end
end

-- Sums that are handed on by one task are taken by the next, which waits for nothing.
function M:handed_on(sm, time, waits)
  local function of(plan, param) return plan and self.g.params[plan.node.op][param] == 1 end
  local before, plan = self.plan_at[sm][time - 1], self.plan_at[sm][time]
  local why = handing.mistake(of(before, "hands"), of(plan, "handed"), waits)
  if why then
    self:report("handing" .. why, "%s %s", self:name(sm, of(plan, "handed") and time or time - 1), why)
  end
end

--- Walks all lists once: which tasks belong to which node, who signals what. Returns false where a list is too long for
--- the clocks.
function M:collect()
  local nodes, sms, fit = self.g.nodes, self.g.sms, true
  for sm = 0, sms - 1 do
    local words = self.words[sm]
    local n = #words // WORDS
    local plan_at, index_at = zeros(n), zeros(n)
    self.plan_at[sm], self.index_at[sm] = plan_at, index_at
    self.stats.tasks = self.stats.tasks + n
    if n > MAX_LIST then
      self:report(nil, "SM %d has %d tasks, a list holds at most %d", sm, n, MAX_LIST)
      fit = false
    end
    for time = 1, n do
      local base = (time - 1) * WORDS
      local node = nodes[words[base + W_NODE] + 1]
      local plan = node and node.spec.opcode == words[base + W_OPCODE] and self.plans[node] or false
      plan_at[time] = plan
      if not plan then
        self:report(nil, "%s: the graph has no such node", self:name(sm, time))
      else
        local i = plan.tasks + 1
        plan.tasks, plan.sm[i], plan.time[i], index_at[time] = i, sm, time, i
        local at, value = plan.word_at, plan.word_value
        for k = 1, #at do
          if words[base + at[k]] ~= value[k] then
            self:wrong_word(plan, plan.words[k], words[base + at[k]], sm, time)
          end
        end
        if words[base + W_SIGNAL] ~= -1 then self:count_signal(words[base + W_SIGNAL], plan, sm, time) end
      end
      self:handed_on(sm, time, words[base + W_WAIT] ~= -1)
    end
    self:handed_on(sm, n + 1)
  end
  return fit
end

function M:count_signal(signal, plan, sm, time)
  local counter = self.counters[signal]
  if not counter then
    counter = { node = plan.node, arrivals = 0, pending = 0 }
    self.counters[signal] = counter
    if signal < 0 or signal >= self.g.counters then
      self:report(nil, "%s signals counter %d of %d", self:name(sm, time), signal, self.g.counters)
    end
  end
  if not plan.d.signal then
    self:report(nil, "%s signals %s, but the op writes nothing that others wait for", self:name(sm, time),
      self:counter_name(signal))
    return
  end
  if counter.node.last_pass ~= plan.node.last_pass then
    self:report(nil, "%s signals counter %d, which belongs to %s: a counter has one node or the passes of one",
      self:name(sm, time), signal, counter.node.name)
  end
  counter.arrivals = counter.arrivals + plan.d.arrivals
  counter.pending = counter.pending + 1
end

-- The work of a task as an interval [from, to), by how the op's work is dealt.
local WORK = {}

function WORK.spread(word, words, base)
  local tile = words[base + word.tile + 1]
  return tile, tile + words[base + word.tiles + 1]
end

function WORK.owner(word, words, base)
  local tile = words[base + word.tile + 1]
  return tile, tile + 1
end

function WORK.columns(word, words, base)
  local column = words[base + word.column + 1]
  return column, column + 1
end

function WORK.every(_, _, _, sm) return sm, sm + 1 end

local WHAT = { spread = "tiles", owner = "tiles", columns = "columns", every = "SMs" }

--- All of a node's work, once. What stays on the SM may be left out where nobody there reads it; check/progress.lua
--- tells of those who do.
function M:coverage(plan)
  local node, g = plan.node, self.g
  local tile = node.spec.tile
  if tile == "cyclic" then return self:cyclic_coverage(plan) end
  local total = tile == "columns" and g.columns or tile == "every" and g.sms or node.first_tile + node.tiles
  local work, word, what = WORK[tile], node.spec.word, WHAT[tile]
  local from, to, order, sorted = zeros(plan.tasks), zeros(plan.tasks), zeros(plan.tasks), true
  for i = 1, plan.tasks do
    local sm = plan.sm[i]
    from[i], to[i] = work(word, self.words[sm], (plan.time[i] - 1) * WORDS, sm)
    order[i] = i
    sorted = sorted and (i == 1 or from[i] >= from[i - 1])
    if tile == "owner" and from[i] >= node.first_tile and from[i] - node.first_tile ~= sm then
      self:report(nil, "%s: tile %d belongs to SM %d", self:name(sm, plan.time[i]), from[i], from[i] - node.first_tile)
    end
  end
  if not sorted then
    table.sort(order, function(a, b)
      if from[a] ~= from[b] then return from[a] < from[b] end
      return a < b
    end)
  end
  local at, last = node.first_tile, nil
  for _, i in ipairs(order) do
    local name = (from[i] ~= at or to[i] > total or to[i] <= from[i]) and self:name(plan.sm[i], plan.time[i])
    local idle = node.spec.idle and to[i] == from[i]
    if from[i] < node.first_tile or to[i] > total or to[i] <= from[i] and not idle then
      self:report(nil, "%s: %s %d to %d are out of range, %s has %d", name, what, from[i], to[i] - 1, node.name, total)
    elseif from[i] < at then
      self:report(nil, "double arrival: %s repeats %s %d of %s", name, what, from[i],
        self:name(plan.sm[last], plan.time[last]))
    elseif from[i] > at and not plan.d.stays then
      self:report(nil, "%s: %s %d to %d are in no list", node.name, what, at, from[i] - 1)
    end
    if to[i] > at then at, last = to[i], i end
  end
  if at < total and not plan.d.stays then
    self:report(nil, "%s: %s %d to %d are in no list", node.name, what, at, total - 1)
  end
  if word.rank then self:ranks(plan) end
end

-- Every SM has its own rank.
function M:ranks(plan)
  local taken = {}
  for i = 1, plan.tasks do
    local sm, time = plan.sm[i], plan.time[i]
    local rank = self.words[sm][(time - 1) * WORDS + plan.node.spec.word.rank + 1]
    if rank < 0 or rank >= self.g.sms then
      self:report(nil, "%s: rank %d is out of range", self:name(sm, time), rank)
    elseif taken[rank] then
      self:report(nil, "%s: rank %d is taken by another SM", self:name(sm, time), rank)
    end
    taken[rank] = true
  end
end

function M:cyclic_coverage(plan)
  local node, word = plan.node, plan.node.spec.word
  local owner, units = {}, 0
  for i = 1, plan.tasks do
    local sm, time = plan.sm[i], plan.time[i]
    local words, base = self.words[sm], (time - 1) * WORDS + 1
    local first, step, last = words[base + word.first], words[base + word.step], words[base + word["end"]]
    if first < 0 or step < 1 or last > node.units then
      self:report(nil, "%s: units %d to %d are out of range, %s has %d", self:name(sm, time), first, last - 1,
        node.name, node.units)
      return
    end
    for unit = first, last - 1, step do
      if owner[unit] then
        self:report(nil, "double arrival: %s repeats units %d of %s", self:name(sm, time), unit,
          self:name(plan.sm[owner[unit]], plan.time[owner[unit]]))
        return
      end
      owner[unit] = i
      units = units + 1
    end
  end
  for unit = 0, units < node.units and node.units - 1 or -1 do
    if not owner[unit] then
      self:report(nil, "%s: units %d are in no list", node.name, unit)
      return
    end
  end
end

return M
