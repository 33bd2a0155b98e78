-- The proof that a step's lists compute what the graph means, made from the encoded words alone.
--
-- The graph says what the step means: its nodes one after the other. The words say what the SMs will do. Nothing that
-- schedule or sync thought along the way is looked at. What is proved, or refused by name:
--
--   words      every word that the op reads is what the graph says it must be; all of a node's work is there, once;
--              weights, buffers, shared memory and registers fit                                (check/words.lua)
--   counters   a counter has one node, or the passes of one wave; a wait is for all arrivals, because a partial count
--              does not say who arrived
--   progress   the lists run to their end with no slack in any queue between the roles of an SM. Ring, job buffers and
--              descriptor queue only ever let a role run ahead, so what ends without them ends with any depth of them
--   handing    a sum that an op hands to the storers itself is what the next task takes, and that waits for nothing
--                                                                                            (check/words.lua)
--   SM-local   registers hold what the graph's last writer put there, the two shared-memory copies of the route are not
--              overwritten while someone reads                                                  (check/progress.lua)
--   order      accesses to the same unit of a buffer, one of them a write, happen in the order of their nodes, and no
--              two tasks of one node make such, unless both add; all are inside the buffer, and what is read or added
--              to was written in this step. A claimed unit may be anybody's                     (check/order.lua)
--
-- Order comes from clocks over (SM, role) threads; hb.lua says what is ordered inside an SM. The two store warps of an
-- SM run apart, so one's program order proves nothing about the other's stores.
--
-- Data that tells that it is there (`posts`, `awaits`; schedule.exchange: validated) needs no order, but four things of
-- the lists: each word is written once a step, by somebody who comes before in the graph; all that read it look; the
-- reader, or somebody it knows of, waits for the writer's counter, so that nobody looks for what his looking holds up.
-- (It may look a little before the counter is full: what it looks for is what it would wait for.) And the signals of a
-- node that writes nothing else, the waits of one that uses nothing else, order nothing else (op.relaxed, op.hinted);
-- to the clocks by which all other accesses go they tell nothing. A launch ends before the next begins, so of the
-- two copies each step's is as the step before left it. Where no counter says that a role of the SM is done with a copy
-- of SM-local data, it returns that copy, once, and the writer waits (`returns`, `awaits`; check/progress.lua).
--
-- Claimed work (`claim`): any SM's task may write any unit, so who reads or overwrites one is ordered after all tasks
-- of the node, and before them who must be. That holds however units come to SMs (schedule.claim: static, tail, queue),
-- so the proof is one for all three. That every SM's task is there, with its own rank and the node's ticket, is proved
-- with the words.
--
-- Not proved, because no word says it: that an op touches only what it declares, that data it takes from older launches
-- or leaves to later ones (`launch`: KV pages, control) is left alone within a step, that claiming gives every unit of
-- a claimed region to exactly one SM (ticket words are no buffers; refvm sees to it in every step, for the units that
-- the step has), that the barriers between the roles of a block order what hb.lua takes from them, that optional tasks
-- sleep in all SMs or in none, that nobody reads what only a sleeping task would have written, and that spin bounds are
-- long enough; that who posts a word leaves it absent in the other copy, and never stores that value. `eased` needs no
-- proof: it changes when data comes, not what is ordered.
local encode = require("encode")
local hb = require("hb")
local ops = require("ops")
local region = require("region")
local M = {}

local MAX_MESSAGES = 40

local ROLE = hb.ROLE
local WORDS, AT = ops.WORDS, ops.AT

-- A proof in the making. What the parts hand each other:
--   plans[node]   what the graph says of a node, and its tasks: plan.sm[i], plan.time[i]; time 1 is a list's first task
--   plan_at[sm]   [time] = plan, false where the graph has no such node; index_at[sm][time] = the task's i there
--   counters[id]  { node, arrivals, pending tasks, base = what who waits learns }
local Check = {}
Check.__index = Check

for _, part in ipairs({ "check.words", "check.progress", "check.order" }) do
  for name, method in pairs(require(part)) do Check[name] = method end
end

--- One more message. Messages with the same key are said once, with their number; without a key always.
function Check:report(key, fmt, ...)
  local seen = key and self.seen[key]
  if seen then
    seen.more = seen.more + 1
    return
  end
  local message = { text = fmt:format(...), more = 0 }
  if key then self.seen[key] = message end
  self.messages[#self.messages + 1] = message
end

--- "layer3.qkv on SM 17 (task 34)": the task's place in the list counts from 0, as the kernel's hang record does.
function Check:name(sm, time)
  local plan = self.plan_at[sm][time]
  local base = (time - 1) * WORDS
  local words = self.words[sm]
  local what = plan and plan.node.name or ("opcode %s of node %s"):format(words[base + AT.opcode],
    words[base + AT.node])
  return ("%s on SM %d (task %d)"):format(what, sm, time - 1)
end

function Check:counter_name(counter)
  local owner = self.counters[counter] and self.counters[counter].node
  return owner and ("counter %d (%s)"):format(counter, owner.name) or ("counter %d"):format(counter)
end

-- What the proof needs of an op.
local function digest(g, op, shared)
  local d = hb.roles_of(op)
  d.accesses, d.registers, d.local_readers, d.arrivals = {}, {}, {}, op.arrivals
  d.relaxed = op.relaxed
  d.stays = op.tile == "every"                          -- all that it writes stays on the SM
  local ambient = { sm = "sm", sms = g.sms, columns = g.columns }
  local function resolve(name)
    if op.word[name] then return ("w[b + %d]"):format(op.word[name] + 1) end
    return tostring(ambient[name] or g.params[op.name][name])
  end
  for _, way in ipairs({ "reads", "writes" }) do
    local writes = way == "writes"
    for _, r in ipairs(op[way]) do
      if writes and r.scope ~= "sm" then d.stays = false end
      if r.global then
        d.accesses[#d.accesses + 1] = {
          name = r.name, role = hb.role_of(op, r.role), writes = writes, claim = r.claim, adds = r.adds,
          posted = r.posted,
          word = op.word[r.name] + 1,
          region = region.compile(r, "w, b, sm", resolve),
        }
      elseif r.scope == "sm" and shared[r.name] then
        d.local_name = r.name
        if writes then
          d.local_writer, d.local_waits = hb.role_of(op, r.role), r.waited
        else
          d.local_readers[#d.local_readers + 1] = hb.role_of(op, r.role)
          if r.returned then d.local_returner = hb.role_of(op, r.role) end
        end
      elseif r.scope == "sm" then
        d.registers[#d.registers + 1] = { name = r.name, writes = writes }
      end
    end
  end
  return d
end

-- Fields that a way of dealing fills in per task; the others are the node's.
local DEALT = {
  spread = { tile = true, tiles = true }, owner = { tile = true }, every = { rank = true },
  cyclic = { first = true, step = true, ["end"] = true }, columns = { column = true },
}

-- What the graph says a constant field must be. Weight offsets are worked out once more, from the arrays' places.
local function constant(g, node, field)
  local from = node.weights[field.name]
  if from then
    local array = g.array[from.array]
    return array.kib + (from.layer - array.layer0) * array.layer_kib
  end
  local value = node.fields[field.name]
  if field.type == "f32" then return (string.unpack("<i4", string.pack("<f", value))) end
  return value
end

-- Who wrote SM-local data last, as the nodes are: a list of nodes, the latest first, up to one that is on every SM. A
-- pass with fewer tiles than SMs leaves the data of the others as it was.
local function writers_of(last)
  local list = {}
  while last do
    list[#list + 1] = last.node
    if last.node.first_pass == last.node then break end
    last = last.before
  end
  return list
end

-- A node's plan; last_writer: of each SM-local buffer, in the order of the nodes, with those before.
local function new_plan(g, node, d, last_writer)
  local plan = { node = node, d = d, tasks = 0, sm = {}, time = {}, groups = {}, words = {}, expect = {} }
  plan.word_at, plan.word_value = {}, {}              -- of plan.words: lists are compared with them word by word
  for a, access in ipairs(d.accesses) do
    local group = hb.new_group(node, access.role, access.writes, access.role == ROLE.compute and d.also or nil,
      plan.sm, plan.time)
    plan.groups[a] = group
    plan.words[#plan.words + 1] = {
      word = access.word, buffer = access.name, value = g.buffer[node.bind[access.name]].offset128,
    }
  end
  for _, field in ipairs(node.spec.fields) do
    if not field.buffer and not DEALT[node.spec.tile][field.name] then
      plan.words[#plan.words + 1] = { word = field.word + 1, name = field.name, value = constant(g, node, field) }
    end
  end
  for i, e in ipairs(plan.words) do plan.word_at[i], plan.word_value[i] = e.word, e.value end
  for _, use in ipairs(d.registers) do
    if not use.writes then plan.expect[use.name] = writers_of(last_writer[use.name]) end
  end
  if d.local_name and not d.local_writer then plan.expect[d.local_name] = writers_of(last_writer[d.local_name]) end
  for _, use in ipairs(d.registers) do
    if use.writes then last_writer[use.name] = { node = node, before = last_writer[use.name] } end
  end
  if d.local_writer then last_writer[d.local_name] = { node = node, before = last_writer[d.local_name] } end
  return plan
end

function Check:prepare()
  local g = self.g
  local shared, digests, last_writer = ops.shared_buffers(g.registry), {}, {}
  for _, buffer in ipairs(g.buffers) do self.buffer_at[buffer.offset128] = buffer end
  for _, node in ipairs(g.nodes) do
    local op = node.spec
    digests[op.name] = digests[op.name] or digest(g, op, shared)
    local plan = new_plan(g, node, digests[op.name], last_writer)
    self.plans[node] = plan
  end
end

local function texts_of(messages)
  local texts = {}
  for i, message in ipairs(messages) do
    if i > MAX_MESSAGES then
      texts[i] = ("and %d more mistakes"):format(#messages - MAX_MESSAGES)
      break
    end
    texts[i] = message.more > 0 and ("%s (and %d more like it)"):format(message.text, message.more) or message.text
  end
  return texts
end

--- Requires: the graph with places, and the words. Returns the list of messages, empty where all is proved, the
--- statistics, and the proof for who goes on with it (check/mixed.lua).
function M.prove(g, words)
  local self = setmetatable({
    g = g, words = words, messages = {}, seen = {}, plans = {}, buffer_at = {}, plan_at = {}, index_at = {},
    counters = {}, stats = { pairs = 0, tasks = 0, waits = 0, counters = g.counters, threads = g.sms * #hb.ROLES },
  }, Check)
  for name, method in pairs(Check) do self[name] = method end       -- found at once, for each of many calls
  self:prepare()
  self:budget()
  local clocks_suffice = self:collect()
  for _, node in ipairs(g.nodes) do self:coverage(self.plans[node]) end
  -- What did not run has no clocks; the deadlock is the message.
  if clocks_suffice and self:simulate() then
    local histories = {}
    for _, node in ipairs(g.nodes) do self:order_node(self.plans[node], histories) end
  end
  return texts_of(self.messages), self.stats, self
end

--- Requires: tasks with fields, waits and places. Leaves: g.words, the encoded lists that the proof is about and that
--- must be emitted as they are; mistakes in diag. Returns the statistics and the proof.
function M.run(g, diag)
  g.words = encode.words(g, g.registry)
  local texts, stats, proof = M.prove(g, g.words)
  for _, text in ipairs(texts) do diag:error({ file = g.model.source }, "%s", text) end
  return stats, proof
end

return M
