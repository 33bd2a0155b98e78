-- Reads the machine code of a kernel (a cubin for sm_90a) and refuses a buffer that is released too early.
--
--   lua5.4 tests/sass/early_release.lua FILE.cubin [KERNEL] [-v]
--
-- A consumer frees a slot of shared memory with mbarrier.arrive.  The hardware orders that arrive behind earlier
-- loads only as far as the instruction says so: a load reports its end on a scoreboard, and whoever needs the data
-- waits for that scoreboard.  ptxas sees no need to make the arrive wait, and moves it above the first use of the
-- loaded words; the slot can then be refilled under a load that is still queued.  The kernel's answer is to mix the
-- loaded words, and-ed with a zero that the compiler cannot see, into the address of the arrive.  This script checks
-- that it worked.
--
-- Nothing here needs a disassembler: the few fields that matter are read from the 16-byte instructions.
--   bits 0-11 opcode   12-15 predicate   16-23 destination   24-31, 32-39, 64-71 source registers
--   bits 105-108 stall   109 yield   110-112 scoreboard set on write   113-115 on read   116-121 scoreboards waited for
--
-- For every arrive, over all paths that lead to it:
--   tied     the shared loads whose words its address depends on
--   pending  the shared loads that have been issued and whose scoreboard nobody has waited for
--   age      of such a load: how many waits on a barrier lie between it and the arrive
-- A pending load is fine only if it belongs to a later stage than all tied ones, so if it is younger.  An arrive with
-- pending loads and no tied ones is refused, and so is a load from a tied address after the arrive.
--
-- Ring slots and job buffers are read 16 bytes a lane, and only such loads count.  Narrower ones read small tables that
-- other barriers own; they count where an arrive is tied to nothing and they have no wait behind them.  Arrives that
-- also expect bytes (the producer's) free nothing.
--
-- It prints the size of the code and counts loads and stores of local memory, which must be 0: they are spills.

local LDS, LDSM, LDL, STL = 0x984, 0x83b, 0x983, 0x387
local ARRIVE, WAIT = 0x9a7, 0x5a7 -- SYNCS.ARRIVE, SYNCS.PHASECHK
local BRA, BRX, CALL, RET, EXIT, NOP = 0x947, 0x949, 0x944, 0x950, 0x94d, 0x918
local NONE = 255 -- register RZ
local TRUE = 7 -- predicate PT
-- A stage is loaded and freed within this many instructions.  Further back an address depends on everything, by way of
-- the counters that live through the whole kernel.
local WINDOW = 200
-- Ages are counted up to here.
local OLD = 3

-- Opcodes (low byte) of arithmetic that has a third source.
local THREE_SOURCES = {}
for _, op in ipairs { 0x10, 0x11, 0x12, 0x16, 0x19, 0x23, 0x24, 0x25, 0x26, 0x27, 0x31, 0x35, 0x3c } do
  THREE_SOURCES[op] = true
end

-- Opcodes (low byte) by which loaded words get into an address: MOV, IADD3, LEA, LOP3, IMAD, VIADD.
local MIXES = { [0x02] = true, [0x10] = true, [0x11] = true, [0x12] = true, [0x24] = true, [0x36] = true }

-- Opcodes (low byte) of arithmetic whose only source is the second: MOV, CS2R, VOTE, I2FP.
local SECOND_ONLY = { [0x02] = true, [0x05] = true, [0x06] = true, [0x45] = true }

-- Opcodes whose bits 16-23 are no register: stores, tests that set predicates, control, uniform registers.
local NO_RESULT = {}
for _, op in ipairs {
  0x386, 0x986, 0x387, 0x388, 0x988, 0x98e, 0x98f, 0x3ba, 0x5b2, 0x9a8, 0x9ab, 0x5ab, 0x992, 0xb1d, 0x3c4, 0x2ca, 0x3c2,
  0x20b, 0x80b, 0xc0b, 0x20c, 0x80c, 0xc0c, 0x22a, 0x81c, 0x806, 0x886, 0x887, 0x882, 0x883, 0x88c, 0x28c, 0x290, 0x890,
  0x291, 0x891, 0x292, 0x892, 0x299, 0x899, 0x8a4, 0x2a4, 0x9c3, 0xab9, 0x2bd, 0x2bf, 0x918, 0x91a, 0x91b, 0x941, 0x942,
  0x944, 0x945, 0x946, 0x947, 0x948, 0x949, 0x94a, 0x94d, 0x950, 0x95c, 0x95d, 0x348, 0x82f, 0x908, 0xc82, 0x3c6,
} do
  NO_RESULT[op] = true
end

-- Opcodes that set no predicate: their bits 81-83, where others name the one that they set, say something else.  LDS,
-- LDC, SHF, SEL, VIADD, HMMA, NOP.
local NO_PREDICATE = {}
for _, op in ipairs { LDS, 0xb82, 0x219, 0x819, 0x207, 0x807, 0x836, 0x23c, NOP } do NO_PREDICATE[op] = true end

local function fail(...)
  io.stderr:write("early_release: ", string.format(...), "\n")
  os.exit(2)
end

--- The bytes of section .text.KERNEL.
local function text_section(path, kernel)
  local file = io.open(path, "rb") or fail("cannot open %s", path)
  local data = file:read("a")
  file:close()
  if data:sub(1, 5) ~= "\127ELF\2" then fail("%s is no 64-bit ELF file", path) end
  local table_at = string.unpack("<I8", data, 41)
  local entry_bytes, count, names = string.unpack("<I2I2I2", data, 59)
  local function section(i)
    local name, _, _, _, offset, bytes = string.unpack("<I4I4I8I8I8I8", data, table_at + i * entry_bytes + 1)
    return name, offset, bytes
  end
  local _, names_at = section(names)
  local found = {}
  for i = 0, count - 1 do
    local name, offset, bytes = section(i)
    name = string.unpack("z", data, names_at + name + 1)
    if name == ".text." .. kernel then return data:sub(offset + 1, offset + bytes) end
    found[#found + 1] = name:match("^%.text%.(.*)")
  end
  fail("%s has no kernel %s, but: %s", path, kernel, table.concat(found, " "))
end

--- How many registers an instruction writes.
local function result_registers(op, high)
  if op == LDS or op == LDL or op == 0x981 or op == 0xb82 then
    local size = high >> 9 & 7
    return size == 6 and 4 or size == 5 and 2 or 1
  end
  if op == LDSM then return 1 << (high >> 8 & 3) end
  local low = op & 0xff
  if low == 0x3c then return 4 end -- HMMA with f32 sums
  if low == 0x25 or op == 0x805 then return 2 end -- IMAD.WIDE, CS2R
  return 1
end

local function is_load(i) return i.op == LDS or i.op == LDSM end
local function is_wide(i) return i.op == LDSM or i.high >> 9 & 7 == 6 end
local function is_shuffle(op) return op & 0xff == 0x89 end

--- Requires: machine code.  Result: instructions 1..n with the fields this check reads, and their successors.
local function decode(text)
  local code = {}
  for at = 0, #text - 16, 16 do
    local low, high = string.unpack("<I8I8", text, at + 1)
    local op = low & 0xfff
    local control = high >> 41
    local i = {
      at = at, op = op, high = high, predicate = low >> 12 & 15, always = low >> 12 & 15 == TRUE,
      sets = control >> 5 & 7, waits = control >> 11 & 63,
      address = low >> 24 & 255, sources = {},
    }
    if not NO_RESULT[op] then
      local to = low >> 16 & 255
      if to ~= NONE then i.first, i.last = to, to + result_registers(op, high) - 1 end
    end
    local function source(register)
      if register ~= NONE then i.sources[#i.sources + 1] = register end
    end
    local form = op >> 8
    if op == ARRIVE or op == LDS or op == LDSM then
      source(i.address)
    elseif form == 2 or form == 4 or form == 8 or form == 10 or form == 12 then
      if not SECOND_ONLY[op & 0xff] then source(i.address) end
      if form == 2 then source(low >> 32 & 255) end
      if THREE_SOURCES[op & 0xff] then source(high & 255) end
    elseif is_shuffle(op) then
      source(i.address)
    elseif form == 3 then
      source(low >> 32 & 255)
    end
    if op == BRA or op == CALL then
      local offset = (high & 0x3ffff) << 38 | (low >> 34) << 8 | low >> 16 & 255 -- in units of 4 bytes, 56 bits
      offset = offset << 8 >> 6 & ~3
      if offset & 1 << 57 ~= 0 then offset = offset | ~0 << 58 end
      i.target = at + 16 + offset
      -- Anything but a plain jump may fall through.
      i.jumps = op == BRA and i.always and high >> 23 & 15 == TRUE and low >> 24 & 0xff == 0 and low >> 32 & 3 == 0
    end
    code[#code + 1] = i
  end

  local entered = { true }
  for n, i in ipairs(code) do
    i.next = {}
    if i.target then
      local to = i.target // 16 + 1
      if not code[to] or i.target % 16 ~= 0 then fail("branch at %#x leaves the kernel", i.at) end
      i.next[1] = to
      entered[to] = true
    end
    local ends = i.jumps or i.op == BRX or ((i.op == EXIT or i.op == RET) and i.always)
    if not ends and code[n + 1] then
      i.next[#i.next + 1] = n + 1
      entered[n + 1] = true
    end
  end
  -- A computed branch can go to any place that nothing else reaches.
  for _, i in ipairs(code) do
    if i.op == BRX then
      for n = 1, #code do
        if not entered[n] then i.next[#i.next + 1] = n end
      end
    end
  end
  for _, i in ipairs(code) do i.previous = {} end
  for n, i in ipairs(code) do
    for _, to in ipairs(i.next) do
      local previous = code[to].previous
      previous[#previous + 1] = n
    end
  end
  return code
end


--- Leaves: i.pending = the shared loads that may be under way when i issues, its own waits done: load -> its age, which
-- is how many waits on a barrier have been passed since, at most OLD.
-- While a load is under way we keep its age and the set of scoreboards any of which tells of its end: its own or, if it
-- has none, those of the shared loads and shuffles after it, for these end in order.
local function find_pending(code)
  local before, queue, queued = { {} }, { 1 }, { true }
  while #queue > 0 do
    local n = table.remove(queue)
    queued[n] = nil
    local i = code[n]
    local mine = (is_load(i) or is_shuffle(i.op)) and i.sets ~= 7 and 1 << i.sets or 0
    local after = {}
    i.pending = {}
    for load, state in pairs(before[n]) do
      if i.waits & state.boards == 0 then
        i.pending[load] = state.age
        after[load] = {
          age = i.op == WAIT and math.min(state.age + 1, OLD) or state.age,
          boards = code[load].sets == 7 and state.boards | mine or state.boards,
        }
      end
    end
    if is_load(i) then after[n] = { age = 0, boards = mine } end
    for _, to in ipairs(i.next) do
      local known, changed = before[to], false
      if not known then
        known, changed = {}, true
        before[to] = known
      end
      for load, state in pairs(after) do
        local k = known[load]
        local age, boards = state.age, state.boards
        if k then age, boards = math.max(age, k.age), boards & k.boards end
        if not k or k.age ~= age or k.boards ~= boards then
          known[load], changed = { age = age, boards = boards }, true
        end
      end
      if changed and not queued[to] then
        queue[#queue + 1], queued[to] = to, true
      end
    end
  end
end

--- Visits what can be reached from the numbers in list against the flow: visit(n, waits) with the least number of waits
-- on a barrier in between; no further where it returns true.
local function walk_back(code, list, visit)
  local seen, layer = {}, list
  for waits = 0, OLD do
    local older, stack = {}, layer
    while #stack > 0 do
      local n = table.remove(stack)
      if not seen[n] then
        seen[n] = true
        if not visit(n, waits) then
          local to = code[n].op == WAIT and waits < OLD and older or stack
          table.move(code[n].previous, 1, #code[n].previous, #to + 1, to)
        end
      end
    end
    layer = older
  end
end

--- The last instruction in front of n that gives register its value under n's own predicate, with nothing in between
-- that jumps here, gives either another value or waits; or nil.
local function same_condition(code, n, register)
  local predicate = code[n].predicate
  for m = n - 1, 1, -1 do
    local i, to = code[m], code[m + 1].previous
    if #to ~= 1 or to[1] ~= m or i.op == WAIT or i.op == 0x804 or i.op == 0x204 then return nil end -- R2P
    if i.first and i.first <= register and register <= i.last then return i.predicate == predicate and m or nil end
    if not NO_PREDICATE[i.op] and i.high >> 17 & 7 == predicate & 7 then return nil end
  end
end

--- The instructions whose value register may hold when n issues: instruction -> age.
local function definitions(code, n, register)
  local memo = code[n].definitions
  if not memo then
    memo = {}
    code[n].definitions = memo
  end
  if not memo[register] then
    local found = {}
    memo[register] = found
    local same = not code[n].always and same_condition(code, n, register)
    if same then
      found[same] = 0
      return found
    end
    walk_back(code, { table.unpack(code[n].previous) }, function(m, waits)
      local i = code[m]
      local writes = i.first and i.first <= register and register <= i.last
      if writes then found[m] = waits end
      return writes and i.always
    end)
  end
  return memo[register]
end

--- The set of instructions from which n can be reached in at most WINDOW steps.
local function window(code, n)
  local near, layer = { [n] = true }, { n }
  for _ = 1, WINDOW do
    local further = {}
    for _, m in ipairs(layer) do
      for _, p in ipairs(code[m].previous) do
        if not near[p] then
          near[p] = true
          further[#further + 1] = p
        end
      end
    end
    layer = further
  end
  return near
end

--- The shared loads that the address of n depends on, not looking through a load: load -> age.
local function tied_loads(code, n)
  local tied, near, age, stack = {}, window(code, n), { [n] = 0 }, { n }
  while #stack > 0 do
    local m = table.remove(stack)
    if is_load(code[m]) then
      tied[m] = age[m]
    elseif m == n or MIXES[code[m].op & 0xff] then
      for _, register in ipairs(code[m].sources) do
        for from, waits in pairs(definitions(code, m, register)) do
          local total = math.min(age[m] + waits, OLD)
          if near[from] and (not age[from] or total < age[from]) then
            age[from] = total
            stack[#stack + 1] = from
          end
        end
      end
    end
  end
  return tied
end

--- The loads that follow n with no wait on a barrier in between and read where load does.
local function later_reads(code, n, load)
  local register = code[load].address
  local found, seen, stack = {}, {}, { table.unpack(code[n].next) }
  while #stack > 0 do
    local m = table.remove(stack)
    local i = code[m]
    if not seen[m] and i.op ~= WAIT then
      seen[m] = true
      if is_load(i) and i.address == register then found[#found + 1] = m end
      if not (i.first and i.first <= register and register <= i.last) then
        table.move(i.next, 1, #i.next, #stack + 1, stack)
      end
    end
  end
  return found
end

local function sorted(set)
  local list = {}
  for n in pairs(set) do list[#list + 1] = n end
  table.sort(list)
  return list
end

local function addresses(code, set)
  local text = {}
  for k, n in ipairs(sorted(set)) do
    if k > 6 then
      text[#text + 1] = "..."
      break
    end
    text[#text + 1] = string.format("%#x", code[n].at)
  end
  return table.concat(text, " ")
end

local function same(one, other)
  for n in pairs(one) do
    if not other[n] then return false end
  end
  for n in pairs(other) do
    if not one[n] then return false end
  end
  return true
end

--- What is wrong with the release at n: a list of sentences, empty if nothing.
local function judge(code, n)
  local tied, pending = tied_loads(code, n), code[n].pending
  local wrong, early, late = {}, {}, {}
  if not next(tied) then
    for load, age in pairs(pending) do
      if age == 0 or is_wide(code[load]) then early[load] = true end
    end
    if next(early) then wrong[1] = "depends on no load, and these are under way: " .. addresses(code, early) end
    return wrong, tied, pending
  end
  -- The stage's are wide: a narrow one, as a wait's look at whether the step is lost, is only something else that the
  -- register may have held.
  local youngest, any_wide = OLD, false
  for load in pairs(tied) do any_wide = any_wide or is_wide(code[load]) end
  for load, age in pairs(tied) do
    if not any_wide or is_wide(code[load]) then youngest = math.min(youngest, age) end
  end
  for load, age in pairs(pending) do
    if age >= youngest and is_wide(code[load]) then early[load] = true end
  end
  for load, age in pairs(tied) do
    local kept = code[load].address ~= NONE and definitions(code, n, code[load].address)
    if age == 0 and kept and same(kept, definitions(code, load, code[load].address)) then
      for _, m in ipairs(later_reads(code, n, load)) do late[m] = true end
    end
  end
  local function blame(set, what)
    if next(set) then wrong[#wrong + 1] = "these loads of its stage " .. what .. ": " .. addresses(code, set) end
  end
  blame(early, "are under way")
  blame(late, "come after it")
  return wrong, tied, pending
end

local function size(set) return #sorted(set) end

local path, kernel, verbose
for _, word in ipairs(arg) do
  if word == "-v" then
    verbose = true
  elseif not path then
    path = word
  else
    kernel = word
  end
end
if not path then fail("usage: early_release.lua FILE.cubin [KERNEL] [-v]") end
kernel = kernel or "nmk_step"

local text = text_section(path, kernel)
local code = decode(text)
find_pending(code)

local bytes = #text
while bytes > 0 and string.unpack("<I8", text, bytes - 15) & 0xfff == NOP do bytes = bytes - 16 end -- NOPs at the end

local counts = { loads = 0, releases = 0, waits = 0, spills = 0, bad = 0, tied = 0 }
for n, i in ipairs(code) do
  if is_load(i) then counts.loads = counts.loads + 1 end
  if i.op == WAIT then counts.waits = counts.waits + 1 end
  if i.op == LDL or i.op == STL then
    counts.spills = counts.spills + 1
    if verbose then print(string.format("  %#07x local memory", i.at)) end
  end
  -- Bit 84 tells an arrive that only counts from one that also expects bytes.
  if i.op == ARRIVE and i.high >> 20 & 1 == 1 and i.pending then
    counts.releases = counts.releases + 1
    local wrong, tied, pending = judge(code, n)
    if next(tied) then counts.tied = counts.tied + 1 end
    if #wrong > 0 then counts.bad = counts.bad + 1 end
    for _, sentence in ipairs(wrong) do print(string.format("  arrive at %#x: %s", i.at, sentence)) end
    if verbose then
      print(string.format("  %#07x tied to %d (%s), under way %d (%s)", i.at, size(tied), addresses(code, tied),
        size(pending), addresses(code, pending)))
    end
  end
end

print(string.format("%s: %d bytes of code, %d spill instructions", kernel, bytes, counts.spills))
print(string.format("%s: %d shared loads, %d waits, %d arrives (%d tied to loads)", kernel, counts.loads, counts.waits,
  counts.releases, counts.tied))
if counts.releases == 0 or counts.loads == 0 or counts.waits == 0 then
  fail("no arrive, no wait or no shared load found: not the code this check knows")
end
if counts.bad > 0 then print(counts.bad .. " early releases") end
os.exit(counts.bad == 0 and counts.spills == 0)
