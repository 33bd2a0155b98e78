-- What early_release.lua says of machine code that is written here, instruction by instruction: what a compiler emits
-- only now and then.  For tests/sass/run.sh.
local LDS, WIDE = 0x984, 6
local NONE, ALWAYS, FREE = 255, 7, 7        -- register RZ, predicate PT, no scoreboard

--- One instruction; see early_release.lua for the fields.
local function code(op, f)
  local low = op | (f.predicate or ALWAYS) << 12 | (f.to or NONE) << 16 | (f.a or NONE) << 24 | (f.b or NONE) << 32
  local high = (f.c or NONE) | (f.size or 0) << 9 | (f.sets_predicate or ALWAYS) << 17 | (f.arrives and 1 << 20 or 0) |
    (f.sets or FREE) << 46 | (f.waits or 0) << 52
  return string.pack("<I8I8", low, high)
end

local function load(to, from, size, board) return code(LDS, { to = to, a = from, size = size, sets = board }) end
local function mix(to, a, b, c, waits, predicate)
  return code(0x212, { to = to, a = a, b = b, c = c, waits = waits, predicate = predicate })
end
local function wait() return code(0x5a7, {}) end
local function arrive(at, predicate) return code(0x9a7, { a = at, predicate = predicate, arrives = true, c = 63 }) end
local function exit() return code(0x94d, {}) end
local function nop() return code(0x918, { sets_predicate = 0 }) end
local function product() return code(0x23c, { to = 40, a = 44, b = 48, c = 40, sets_predicate = 2 }) end
local function compare(predicate) return code(0x20c, { a = 9, b = 9, sets_predicate = predicate }) end

--- A file with one kernel.
local function elf(name, text)
  local names = "\0.shstrtab\0.text." .. name .. "\0"
  local names_at = 64
  local text_at = names_at + #names
  local function section(at, offset, bytes)
    return string.pack("<I4I4I8I8I8I8", at, 1, 0, 0, offset, bytes) .. ("\0"):rep(24)
  end
  local sections = ("\0"):rep(64) .. section(1, names_at, #names) .. section(11, text_at, #text)
  local header = "\127ELF\2" .. ("\0"):rep(35) .. string.pack("<I8", text_at + #text) .. ("\0"):rep(10)
  header = header .. string.pack("<I2I2I2", 64, 3, 1)
  return header .. names .. text .. sections
end

local folder = assert(arg[1], "usage: instructions.lua FOLDER")
local function case(name, accepted, ...)
  local path = ("%s/%s.cubin"):format(folder, name)
  local file = assert(io.open(path, "wb"))
  file:write(elf("k", table.concat({ ... })))
  file:close()
  local pipe = io.popen(("lua5.4 tests/sass/early_release.lua %s k 2>&1"):format(path))
  local said = pipe:read("a")
  local good = pipe:close() or false
  local verdict = good and true or said:find("arrive at") and false
  if verdict == accepted then
    print("ok - sass " .. (accepted and "accepts " or "refuses ") .. name)
  else
    print(("not ok - sass %s %s: %s"):format(accepted and "accepts" or "refuses", name, said:gsub("%s+", " ")))
  end
  return verdict == accepted
end

-- A lane frees the stage in R4 while the next one is on its way to R12; the register of the address held another stage
-- before, younger than the next one.  In between all lanes meet, which is a no-operation, or there is a product: both
-- have other bits where a comparison names the predicate that it sets.
local function freed(between, waits, predicate)
  return wait(), load(4, 2, WIDE, 0), wait(), load(12, 3, WIDE, 1), load(20, 30, WIDE, 2), mix(24, 20, 20, NONE, 4),
    mix(20, 4, 5, 6, waits, predicate), between, mix(20, 20, 7, NONE, 0, predicate), arrive(20, predicate),
    exit()
end
local good = case("a_register_used_before", true, freed(nop(), 1, 0))
good = case("a_product_in_between", true, freed(product(), 1, 2)) and good
good = case("a_lane_that_may_be_another", false, freed(compare(0), 1, 0)) and good
good = case("another_lane_of_another_predicate", false, freed(compare(2), 1, 2)) and good
good = case("a_stage_that_nobody_waits_for", false, freed(nop(), 0, 0)) and good
os.exit(good)
