-- The op registry: reads templates/ops/*.cu, one opcode per file.
--
-- An op file is a metadata table, sections of device code by role and a plain C reference. This stage checks every
-- word of the table and derives what other stages need, so that no other stage reads an op file:
--
--   registry.list            ops in opcode order; registry.by_name[name] is the same op
--   op.opcode                1-based, by name; those of prefill come last
--   op.params, op.task       lists of { name =, type = }
--   op.fields                descriptor fields in word order, { name =, type =, word =, buffer = formal name or nil };
--                            op.word[name] is the word. Task fields come first, then one word per global buffer
--   op.reads, op.writes      regions { name =, type =, role =, scope =, launch =, claim =, adds =, lo =, hi =, step =,
--                            eval = { lo, hi, step } }; eval.lo(env) computes the expression. adds: written only by
--                            atomic additions of integers, so that tasks of a node may share units: their order
--                            changes nothing. wide: what a region on the SM is where a step has more columns than an
--                            MMA, lo .. hi of a global buffer
--                            posts: its words are written so that they tell that they are there; awaits: its words
--                            are read so that it is seen whether they are. posted: the schedule has it so
--                            returns: of data on the SM: the role tells when it is done with the copy; the writer
--                            `awaits` that before it fills the copy again. returned, waited: the schedule has it so
--                            unkept: only there where SMs do not keep the residual in registers (graph.lua); op.all has
--                            the regions of both
--   op.roles[role]           true where the role has work; op.supplied[role] the pipeline that does it
--   op.sections[role]        the device code; op.variants[role][target] is the code that takes its place on one target,
--                            "" being the section itself
--   op.relaxed               its signals order nothing, because all that it writes is posted
--   op.hinted                its waits are hints, because all that it uses is posted
--   op.claim                 "queue": the op's units come to SMs at run time; nil: each task's regions are its own.
--                            What the table says is op.may_claim; "schedule": as schedule.claim has it, see M.settle
--                            "chunk": of a launch that takes prompts: the units are those of the chunk, and any SM's
--                            task may have any of them
--   op.launch                the launch that the op belongs to: "step", or "prefill"
--   op.optional              its tasks run only in launches where a column wants them (Helper::awake), all or none;
--                            else they wait for nothing, touch nothing and signal at once
--   op.idle                  a spread op of which SMs without a tile have a task too: they write what they have to say
--   op.wide                  name of the op that stands for it where a step has more columns than an MMA
--   op.early                 the parameter that says whether its struct Before is made before it waits; nil: always
--   op.eased                 its weights stream with one stage less in flight; what the table says is op.may_ease,
--                            `chained`: in models whose layers are one chain of exchanges, where fences wait for loads
--   op.in_chain              the role that in such models, where it has nothing else to do, takes over from `help`, the
--                            op's role in all others; M.settle lets roles and regions say which of the two it is
--   op.inline                { device, reference }: the function apply(x) of an op that can be inserted where a value
--                            is in registers; nil of all others
--   op.points                { name =, type = }: where its own code lets such ops in, by calling at_NAME(x)
--   op.tests                 { name =, tolerance =, line =, text = }: the bodies of its //@test sections
--   op.try                   { value =, with = }: how tests insert it into a model that lacks it
--   op.wait, op.signal       the role that waits; the one that signals, nil where nothing is written that others await
--   op.arrivals              arrivals at the op's counter per task
--   op.eval_cost(env)        bytes one task streams
local diagnostics = require("diag")
local host = require("host")

local M = {}

M.ROLES = { "load", "compute", "store", "help" }
-- Sections of device code: those of the roles, and the function that other ops call.
local SECTIONS = { "load", "compute", "store", "help", "inline" }
M.FIRST_WORD, M.WORDS = 8, 32
-- Columns of a tile of an MMA.
M.TILE_COLUMNS = 8
M.HEADER = { "opcode", "node", "wait_a", "arrivals_a", "wait_b", "arrivals_b", "signal", "local" }
--- Where a word of the header is in a task's words, as Lua counts.
M.AT = {}
for i, name in ipairs(M.HEADER) do M.AT[name] = i end

-- How units of work whose number only run time knows come to SMs: all by number; all but the last rounds, those by
-- ticket; all by ticket; those of full layers by ticket. In C NMK_CLAIM_STATIC and so on, numbered from 0.
M.CLAIMS = { "static", "tail", "queue", "full" }

--- What an op that a spec inserts calls the value that it is inserted behind, and what it makes of it; without `out` it
--- changes `in` itself.
M.IN, M.OUT = "in", "out"

-- Roles that may write global memory, with their warps: each signals after its last store. Where compute writes itself,
-- in a prefill launch and in a chain (in_chain), one thread signals behind a barrier of all.
M.SIGNALS = { step = { store = 2, help = 1 }, prefill = { compute = 1 } }
M.LAUNCHES = { "step", "prefill" }
-- What a shared pipeline (templates/prelude.cuh) supplies where the op has no section of its own.
local PIPELINES = { gemm_x = { load = true, compute = true }, row_tile = {}, elementwise = {} }
-- Pipelines that are op files of their own: all but what the op must say itself comes from there.
local BASES = { elementwise = "templates/elementwise.cu" }
local BASED = { "tile", "task", "reads", "writes", "cost", "wait", "claim", "eased", "optional" }
-- Fields that a way of dealing tiles fills in.
local TILES = {
  spread = { "tile", "tiles" },
  owner = { "tile" },
  every = {},
  cyclic = { "first", "step", "end" },
  columns = { "column" },
}
-- Names every expression may use besides params and task fields.
local AMBIENT = { "sm", "sms", "columns" }
local WAIT_ORDER = { step = { "compute", "help", "store" }, prefill = { "load", "compute" } }

local TYPES = { i32 = true, f32 = true }
local DATA_TYPES = { bf16 = true, f32 = true, i32 = true, u64 = true, number = true } -- number: bf16 or f32
-- Opcodes of a step are bits of 32-bit words in the kernel, and 0 ends a list.
local MOST = 31
local POINT_TYPES = { f32 = true }
local TOLERANCE = 1e-5

-- The string keys of a table, sorted.
local function keys_of(set)
  local names = {}
  for name in pairs(set) do
    if type(name) == "string" then
      names[#names + 1] = name
    end
  end
  table.sort(names)
  return names
end

local function set_of(list)
  local set = {}
  for _, name in ipairs(list) do
    set[name] = true
  end
  return set
end

-- What Lua would take for more than whole numbers and their operators: other signs (a single / among them), a comment,
-- 1e3 and 0x10, a call; and nothing at all.
local NO_EXPRESSION = { "[^%w_%s%+%-%*%%%(%)]", "%-%-", "%f[%w_]%d+[%a_]", "[%w_)]%s*%(", "^%s*$" }

--- Compiles an integer expression. Returns a function of a table of names, and the list of names used; or nil, why.
-- Field names such as `end` are words of Lua, so every name becomes an index.
function M.compile(expression)
  for _, refused in ipairs(NO_EXPRESSION) do
    if expression:gsub("//", "*"):find(refused) then
      return nil, "only names, whole numbers, + - * // % and parentheses are allowed"
    end
  end
  local names, seen = {}, {}
  local body = expression:gsub("[%w_]+", function(word)
    if word:find("^%d") then
      return word
    end
    if not seen[word] then
      seen[word] = true
      names[#names + 1] = word
    end
    return ("e[%q]"):format(word)
  end)
  local chunk, why = load("local e = ... return " .. body, "=expression", "t", {})
  if not chunk then
    return nil, (why:gsub("^expression:%d+: ", ""))
  end
  return chunk, names
end

-- One op file while it is read: knows its text, so that a message can name the line of a word.
local File = {}
File.__index = File

function File:line_of(offset)
  local _, newlines = self.text:sub(1, offset - 1):gsub("\n", "")
  local start = self.text:sub(1, offset - 1):match(".*\n()") or 1
  return newlines + 1, offset - start + 1
end

--- Offset of the first of the patterns that is found from the part being read onwards, inside the table.
function File:find(...)
  local from, to = self.part or self.table_from or 1, self.table_to or #self.text
  for _, pattern in ipairs({ ... }) do
    local found = self.text:match(pattern, from)
    if found and found <= to then
      return found
    end
  end
  return from
end

local function literally(word)
  return (word:gsub("%W", "%%%0"))
end

function File:position(offset)
  local line, col = self:line_of(offset)
  return { file = self.name, line = line, col = col }
end

--- Where `word` stands as a key.
function File:key(word)
  return self:position(self:find("%f[%w_]()" .. literally(word) .. "%s*="))
end

--- Where `word` stands as a string or in one.
function File:at(word)
  local plain = literally(word)
  return self:position(self:find('"()' .. plain .. '"', "()" .. plain))
end

--- From here on words are looked for from the key `word` on; nil: in the whole table.
function File:enter(word)
  self.part = nil
  if word then
    self.part = self:find("%f[%w_]()" .. literally(word) .. "%s*=")
  end
end

--- where: a position, a string in the table, or nil for the part being read.
function File:error(where, ...)
  local pos = where
  if type(where) ~= "table" then
    pos = where and self:at(where) or self:position(self.part or self.table_from or 1)
  end
  self.diag:error(pos, ...)
end

local function value_kind(value)
  return math.type(value) or type(value)
end

--- Checks a named table's keys and their types. `schema[key] = kind`, `required` a list of keys. Takes out values of a
--- wrong type.
function File:check_keys(what, value, schema, required)
  local known, keys, present = keys_of(schema), {}, {}
  for key in pairs(value) do
    keys[#keys + 1] = key
  end
  table.sort(keys, function(a, b)
    return tostring(a) < tostring(b)
  end)
  for _, key in ipairs(keys) do
    local kind = schema[key]
    present[key] = true
    if not kind and type(key) == "string" then
      self:error(self:key(key), "%s: unknown key '%s'%s", what, key, diagnostics.hint(key, known))
      present[diagnostics.nearest(key, known) or ""] = true
    elseif not kind then
      self:error(nil, "%s: unexpected entry %s", what, tostring(value[key]))
    elseif type(value[key]) ~= kind then
      self:error(type(key) == "string" and self:key(key) or nil, "%s: '%s' must be a %s, not %s", what, key, kind,
        value_kind(value[key]))
      value[key] = nil
    end
  end
  for _, key in ipairs(required) do
    if not present[key] then
      self:error(nil, "%s: '%s' is missing", what, key)
    end
  end
end

local function is_name(name)
  return type(name) == "string" and name:find("^[%l][%l%d_]*$") ~= nil
end

--- A list of { "name", "type" }. `taken` holds names in use, with who uses them.
function File:read_fields(what, list, taken)
  local fields = {}
  self:enter(what)
  for i, entry in ipairs(list or {}) do
    if type(entry) ~= "table" or not is_name(entry[1]) then
      self:error(nil, "%s entry %d: expected { \"name\", \"type\" } with a lower-case name", what, i)
    else
      local name, kind = entry[1], entry[2]
      if not TYPES[kind] then
        self:error(name, "%s '%s': type %s is not one of %s", what, name, tostring(kind),
          table.concat(keys_of(TYPES), ", "))
      end
      if entry[3] ~= nil then
        self:error(name, "%s '%s': expected { \"name\", \"type\" }", what, name)
      end
      if taken[name] then
        self:error(name, "%s '%s': the name is already used by %s", what, name, taken[name])
      else
        taken[name] = what
        fields[#fields + 1] = { name = name, type = kind }
      end
    end
  end
  self:enter()
  return fields
end

function File:read_expression(what, expression, known)
  local fn, names = M.compile(expression)
  if not fn then
    self:error(expression, "%s: \"%s\": %s", what, expression, names)
    return nil
  end
  local known_set = set_of(known)
  for _, name in ipairs(names) do
    if not known_set[name] then
      self:error(expression, "%s: \"%s\": unknown name '%s'%s", what, expression, name, diagnostics.hint(name, known))
      fn = nil
    end
  end
  return fn
end

local REGION = {
  [1] = "string", [2] = "string", role = "string", scope = "string", launch = "string", claim = "boolean",
  adds = "boolean", wide = "table", posts = "boolean", awaits = "boolean", returns = "boolean",
  unkept = "boolean", lo = "string", hi = "string", step = "string",
}

function File:read_region(what, entry, known, op)
  if type(entry) ~= "table" or not is_name(entry[1]) then
    self:error(what, "%s: expected { \"buffer\", \"type\", role = ... }", what)
    return nil
  end
  self.part = self:find('()"' .. literally(entry[1]) .. '"')
  if entry.wide and self.wide then
    local global = { entry[1], entry[2], role = entry.role, launch = entry.launch, claim = entry.claim }
    for key, value in pairs(entry.wide) do
      global[key] = value
    end
    entry = global
  end
  local region = { name = entry[1], type = entry[2], eval = {}, pos = self:position(self.part + 1) }
  what = ("%s '%s'"):format(what, region.name)
  local reads = what:find("^reads") ~= nil
  local in_step = not entry.scope and not entry.launch
  local dealt = not entry.claim or op.claim == "schedule"
  self:check_keys(what, entry, REGION, in_step and dealt and { "role", "lo", "hi" } or { "role" })
  for _, key in ipairs({ "role", "scope", "launch", "claim", "adds", "posts", "awaits", "returns", "unkept",
    "lo", "hi", "step" }) do
    region[key] = entry[key]
  end
  region.may_claim = region.claim
  local function one_of(key, choices)
    if region[key] ~= nil and not set_of(choices)[region[key]] then
      self:error(region[key], "%s: %s '%s' is not one of %s", what, key, region[key], table.concat(choices, ", "))
      region[key] = nil
    end
  end
  one_of("role", M.ROLES)
  one_of("scope", { "sm" })
  one_of("launch", reads and { "older" } or { "later" })
  if region.type and not DATA_TYPES[region.type] then
    self:error(region.type, "%s: type '%s' is not one of %s", what, region.type,
      table.concat(keys_of(DATA_TYPES), ", "))
  end
  if region.role and not op.roles[region.role] then
    self:error(region.pos, "%s: the op has no role '%s'", what, region.role)
  end
  region.global = in_step
  if entry.returns and not (reads and entry.scope == "sm") then
    self:error(region.pos, "%s: only what is read on the SM is returned", what)
  end
  if region.global then
    if not region.type then
      self:error(region.pos, "%s: a buffer in global memory needs a type", what)
    end
    if region.claim and reads then
      self:error(region.pos, "%s: only what is written can be claimed", what)
    elseif region.claim then
      if not op.claim then
        self:error(region.pos, "%s: claimed, but the op has no claim = \"queue\"", what)
      end
    end
    if reads and region.role == "load" and op.claim ~= "chunk" then
      self:error(region.pos, "%s: bulk copies may read only data older than the launch", what)
    end
    if region.adds and reads then
      self:error(region.pos, "%s: only what is written can be added to", what)
    end
    if reads and region.posts or not reads and region.awaits then
      self:error(region.pos, "%s: what is written is posted, what is read awaited", what)
    end
    if region.posts and region.adds then
      self:error(region.pos, "%s: what is added to does not tell that it is there", what)
    end
    local writers = M.SIGNALS[op.launch]
    -- compute may add in a step: it signals nothing, but the storers that it hands on to tell of it
    local adder = region.adds and region.role == "compute" and op.launch == "step"
    if not reads and region.role and not writers[region.role] and not adder then
      self:error(region.pos, "%s: only %s may write global memory", what, table.concat(keys_of(writers), " or "))
    end
  end
  for _, key in ipairs({ "lo", "hi", "step" }) do
    if region[key] then
      region.eval[key] = self:read_expression(("%s %s"):format(what, key), region[key], known)
    end
  end
  region.eval.step = region.eval.step or function()
    return 1
  end
  return region
end

--- The regions of `reads` or `writes`.
function File:read_regions(way, list, known, op)
  self:enter(way)
  local regions = {}
  for _, entry in ipairs(list or {}) do
    regions[#regions + 1] = self:read_region(way, entry, known, op)
    self.part = self.part and self.part + 1
  end
  self:enter()
  return regions
end

--- The first line of a test: //@test NAME, or //@test tolerance=1e-3 NAME.
function File:read_test(pos, words)
  local test = { tolerance = TOLERANCE, name = table.concat(words, " ", 2) }
  local bound = words[2] and words[2]:match("^tolerance=(.*)$")
  if bound then
    test.tolerance, test.name = tonumber(bound), table.concat(words, " ", 3)
    if not test.tolerance or test.tolerance < 0 or test.tolerance > 1 then
      self:error(pos, "//@test: tolerance '%s' is not a number from 0 to 1", bound)
    end
  end
  if test.name == "" then self:error(pos, "//@test: say in a few words what is tested: //@test tolerance=1e-5 NAME") end
  return test
end

--- Splits what follows the table into sections.
function File:read_sections(from)
  local device, reference = {}, nil
  local tests = {}
  local current
  local line = self:line_of(from)
  for text in (self.text:sub(from) .. "\n"):gmatch("(.-)\n") do
    local pos = { file = self.name, line = line, col = 1 }
    local mark = text:match("^//@(.*)$")
    if mark then
      local words = {}
      for word in mark:gmatch("%S+") do
        words[#words + 1] = word
      end
      current = { line = line + 1, lines = {}, file = self.name }
      if words[1] == "reference" and #words == 1 then
        if reference then
          self:error(pos, "a second //@reference")
        end
        reference = current
      elseif words[1] == "device" and #words >= 2 and #words <= 3 then
        local role, variant = words[2], words[3] or ""
        if not set_of(SECTIONS)[role] then
          self:error(pos, "//@device: unknown role '%s'%s", role, diagnostics.hint(role, SECTIONS))
        else
          device[role] = device[role] or {}
          if device[role][variant] then
            self:error(pos, "a second //@device %s", table.concat(words, " ", 2))
          else
            device[role][variant] = current
          end
        end
      elseif words[1] == "test" then
        current.test = self:read_test(pos, words)
        tests[#tests + 1] = current
      else
        self:error(pos, "unknown section '//@%s'; expected //@device ROLE, //@reference or //@test NAME", mark)
      end
    elseif current then
      current.lines[#current.lines + 1] = text
    elseif text:find("%S") then
      self:error(pos, "text before the first section")
    end
    line = line + 1
  end
  local function finish(section)
    while #section.lines > 0 and not section.lines[#section.lines]:find("%S") do
      section.lines[#section.lines] = nil
    end
    section.text = #section.lines > 0 and table.concat(section.lines, "\n") .. "\n" or ""
    section.lines = nil
  end
  for _, role in ipairs(SECTIONS) do
    for _, variant in ipairs(keys_of(device[role] or {})) do
      finish(device[role][variant])
    end
  end
  if reference then
    finish(reference)
  end
  for i, section in ipairs(tests) do
    finish(section)
    local test = section.test
    tests[i] = { name = test.name, tolerance = test.tolerance, line = section.line, text = section.text }
    if section.text == "" then
      self:error({ file = self.name, line = section.line - 1, col = 1 }, "//@test '%s' is empty", test.name)
    end
  end
  return device, reference, tests
end

local OP = {
  name = "string", summary = "string", pipeline = "string", points = "table", try = "table", wide = "string",
  early = "string", claim = "string", launch = "string", eased = "boolean", chained = "boolean", in_chain = "string",
  optional = "boolean", idle = "boolean", params = "table",
  task = "table", reads = "table", writes = "table", tile = "string", wait = "string", cost = "string",
}
local OP_REQUIRED = { "name", "summary", "tile", "cost" }

local TRY = { value = "string", with = "table" }

--- How tests insert the op: { value =, with = }.
function File:read_try(try)
  if not try then return nil end
  self:enter("try")
  self:check_keys("try", try, TRY, { "value" })
  for name, value in pairs(try.with or {}) do
    if type(name) ~= "string" or type(value) ~= "number" then
      self:error(nil, "try: with: expected { name = number, ... }")
    end
  end
  try.line = self:key("try").line
  self:enter()
  return try
end

--- The places in registers where ops may be inserted.
function File:read_points(list)
  local points = {}
  self:enter("points")
  for i, entry in ipairs(list or {}) do
    if type(entry) ~= "table" or not is_name(entry[1]) or not POINT_TYPES[entry[2]] or entry[3] ~= nil then
      self:error(nil, "points entry %d: expected { \"name\", \"f32\" } with a lower-case name", i)
    else
      points[#points + 1] = { name = entry[1], type = entry[2] }
    end
  end
  self:enter()
  return points
end

--- What an op takes from the file that is its pipeline: the rest of the table, and the sections that call its apply().
function File:read_base(raw, device, reference)
  local path = BASES[raw.pipeline]
  for _, key in ipairs(BASED) do
    if raw[key] ~= nil then
      self:error(self:key(key), "'%s' is the pipeline's: leave it out, or leave out pipeline = \"%s\"", key,
        raw.pipeline)
    end
  end
  for _, role in ipairs(M.ROLES) do
    if device[role] then
      self:error(nil, "//@device %s: the pipeline %s supplies it; expected //@device inline", role, raw.pipeline)
    end
  end
  local text = self.read_file and self.read_file(path)
  if not text then
    self:error(self:key("pipeline"), "pipeline '%s': %s cannot be read", raw.pipeline, path)
    return device, reference
  end
  local base = setmetatable({ name = path, text = text, diag = self.diag }, File)
  local table_of_base, rest = base:read_table()
  if not table_of_base then return device, reference end
  for _, key in ipairs(BASED) do raw[key] = table_of_base[key] end
  local base_device, base_reference = base:read_sections(rest)
  for _, role in ipairs(M.ROLES) do device[role] = base_device[role] end
  return device, base_reference
end

-- More than any table needs: one that never ends, or fills the memory, is a mistake like others.
local MOST_INSTRUCTIONS, MOST_BYTES = 10000000, 16 << 20

--- Runs a table's chunk within these bounds: its value; or nil and a message with the line.
local function run_table(chunk, name)
  local thread = coroutine.create(chunk)
  debug.sethook(thread, function() error("the table takes too long", 2) end, "", MOST_INSTRUCTIONS)
  host.bound(MOST_BYTES)
  local ok, value = coroutine.resume(thread)
  host.bound(0)
  if ok then return value end
  if value == "not enough memory" then -- Lua's own message, which has no line
    local level, at = 0, debug.getinfo(thread, 0, "l")
    while at and at.currentline < 0 do level, at = level + 1, debug.getinfo(thread, level + 1, "l") end
    value = ("%s:%d: the table takes too much memory"):format(name, at and at.currentline or 0)
  end
  return nil, value
end

--- The table's text compiled in an empty environment; newlines in front keep the file's own line numbers.
function File:read_table()
  local open_from, open_to = self.text:find("/*@op", 1, true)
  if not open_from then
    self:error({ file = self.name, line = 1, col = 1 }, "no /*@op ... @*/ table")
    return nil
  end
  local close_from, close_to = self.text:find("@*/", open_to, true)
  if not close_from then
    self:error({ file = self.name, line = self:line_of(open_from), col = 1 }, "the /*@op table is not closed by @*/")
    return nil
  end
  self.table_from, self.table_to = open_to + 1, close_from - 1
  local first = self:line_of(open_to)
  local source = ("\n"):rep(first - 1) .. "return {" .. self.text:sub(open_to + 1, close_from - 1) .. "\n}"
  local chunk, why = load(source, "@" .. self.name, "t", {})
  local value
  if chunk then value, why = run_table(chunk, self.name) end
  if not value then
    local line, message = tostring(why):match(":(%d+): (.*)$")
    self:error({ file = self.name, line = tonumber(line) or first, col = 1 }, "%s", message or tostring(why))
    return nil
  end
  return value, close_to + 1
end

function File:check_tile(op, taken)
  local needs = TILES[op.tile]
  if not needs then
    self:error(self:key("tile"), "tile '%s' is not one of %s", op.tile, table.concat(keys_of(TILES), ", "))
    return
  end
  for _, name in ipairs(needs) do
    if taken[name] ~= "task" then
      self:error(self:key("tile"), "tile = \"%s\" needs the task field '%s'", op.tile, name)
    end
  end
end

--- Roles: the sections present and those that the pipeline supplies. An empty section leaves the work to the pipeline.
function File:derive_roles(op, device)
  local supplies = op.pipeline and PIPELINES[op.pipeline] or {}
  op.roles, op.supplied, op.sections, op.variants = {}, {}, {}, device
  for _, role in ipairs(M.ROLES) do
    local variants = device[role]
    local section = variants and variants[""]
    if variants and not section then
      self:error(nil, "//@device %s has variants but no section without one", role)
    end
    if section and section.text ~= "" then
      op.sections[role] = section
    elseif supplies[role] then
      op.supplied[role] = op.pipeline
    elseif section then
      self:error({ file = self.name, line = section.line - 1, col = 1 }, "//@device %s is empty", role)
    end
    if variants or supplies[role] then
      op.roles[role] = true
    end
  end
end

-- Until the op is settled, help does its work.
function File:check_chain(op)
  if not op.in_chain then return end
  local roles = table.concat(keys_of(op.roles), ", ")
  if op.in_chain ~= "compute" or roles ~= "compute, help" then
    self:error(self:key("in_chain"), "in_chain: expected \"compute\", with sections //@device compute and " ..
      "//@device help and no other")
    op.in_chain = nil
  else
    op.roles = { help = true }
  end
end

-- The words of a descriptor, by the op's task fields and regions.
local function number_fields(op)
  op.fields, op.word, op.buffers = {}, {}, {}
  local function add(name, kind, buffer)
    local word = M.FIRST_WORD + #op.fields
    op.fields[#op.fields + 1] = { name = name, type = kind, word = word, buffer = buffer }
    op.word[name] = word
  end
  for _, field in ipairs(op.task) do add(field.name, field.type) end
  for _, regions in ipairs({ op.reads, op.writes }) do
    for _, region in ipairs(regions) do
      if region.global and not op.word[region.name] then
        add(region.name, "i32", region.name)
        op.buffers[#op.buffers + 1] = region.name
      end
    end
  end
end

function File:derive_fields(op, taken)
  for _, regions in ipairs({ op.reads, op.writes }) do
    for _, region in ipairs(regions) do
      local name = region.name
      if region.global and taken[name] and taken[name] ~= "buffer" then
        self:error(region.pos, "buffer '%s': the name is already used by %s", name, taken[name])
      elseif region.global and not taken[name] then
        taken[name] = "buffer"
      end
    end
  end
  number_fields(op)
  local room = M.WORDS - M.FIRST_WORD
  if #op.fields > room then
    self:error(self:key("task"), "%d descriptor fields (task fields and buffers), but there is room for %d", #op.fields,
      room)
  end
end

function File:derive_sync(op)
  for _, region in ipairs(op.writes) do
    if region.global and M.SIGNALS[op.launch][region.role] then
      if op.signal and op.signal ~= region.role then
        self:error(region.pos, "writes '%s': by role %s, but another buffer is written by %s; one role must write all",
          region.name, region.role, op.signal)
      end
      op.signal = op.signal or region.role
    end
  end
  op.arrivals = op.signal and M.SIGNALS[op.launch][op.signal]
  local order = WAIT_ORDER[op.launch]
  if op.wait and not (set_of(order)[op.wait] and op.roles[op.wait]) then
    self:error(self:key("wait"), "wait = \"%s\": expected one of the op's roles among %s", op.wait,
      table.concat(order, ", "))
  end
  for _, role in ipairs(order) do
    if not op.wait and op.roles[role] then
      op.wait = role
    end
  end
  if not op.wait then
    self:error(nil, "the op has none of the roles %s", table.concat(order, ", "))
  end
end

--- Reads one op file. Returns the op, or nil where the table could not be read; mistakes go to diag.
function File:read()
  local raw, rest = self:read_table()
  if not raw then
    return nil
  end
  local device, reference, tests = self:read_sections(rest)
  local inline = device.inline and device.inline[""]
  if inline then
    inline = { device = inline, reference = reference }
    device.inline = nil
  end
  if BASES[raw.pipeline] then
    if not inline then self:error(nil, "pipeline '%s' needs a section //@device inline", raw.pipeline) end
    device, reference = self:read_base(raw, device, reference)
  elseif inline then
    self:error({ file = self.name, line = inline.device.line - 1, col = 1 },
      "//@device inline needs pipeline = \"elementwise\"")
  end
  self:check_keys("op", raw, OP, OP_REQUIRED)
  local stem = self.name:match("([^/]*)%.cu$")
  if raw.name and raw.name ~= stem then
    self:error(self:key("name"), "name '%s' differs from the file's name", raw.name)
  end
  local op = {
    name = stem, file = self.name, summary = raw.summary or "", pipeline = raw.pipeline, claim = raw.claim,
    launch = raw.launch or "step", eased = raw.eased or false, may_ease = raw.eased or false,
    chained = raw.chained or false, in_chain = raw.in_chain, optional = raw.optional or false,
    idle = raw.idle or false, tile = raw.tile or "",
    wide = raw.wide, early = raw.early, wait = raw.wait, reads = {}, writes = {}, inline = inline, tests = tests,
    points = self:read_points(raw.points), try = self:read_try(raw.try),
  }
  if op.pipeline and not PIPELINES[op.pipeline] then
    self:error(self:key("pipeline"), "unknown pipeline '%s'%s", op.pipeline,
      diagnostics.hint(op.pipeline, keys_of(PIPELINES)))
  end
  if not set_of(M.LAUNCHES)[op.launch] then
    self:error(self:key("launch"), "launch '%s' is not one of %s", op.launch, table.concat(M.LAUNCHES, ", "))
    op.launch = "step"
  end
  if op.claim and op.claim ~= "queue" and op.claim ~= "schedule" and op.claim ~= "chunk" then
    self:error(self:key("claim"), "claim '%s': neither \"queue\" nor \"schedule\" nor \"chunk\"", op.claim)
  end
  if (op.claim == "chunk") ~= (op.launch == "prefill") then
    self:error(self:key("claim"), "claim = \"chunk\" and launch = \"prefill\" go together")
  end
  op.may_claim = op.claim
  local taken = {}
  for _, name in ipairs(AMBIENT) do
    taken[name] = "nmkgen"
  end
  op.params = self:read_fields("params", raw.params, taken)
  for _, param in ipairs(op.params) do op.claim_key = op.claim_key or param.name:match("^claim_(.*)$") end
  if op.claim == "schedule" and not op.claim_key then
    self:error(self:key("claim"), "claim \"schedule\": no parameter claim_KEY says by which of its keys")
  end
  op.task = self:read_fields("task", raw.task, taken)
  self:derive_roles(op, device)
  op.reference = reference
  if op.optional and (op.roles.load or op.roles.compute or op.roles.store) then
    self:error(self:key("optional"), "optional: only an op whose one role is help can sleep")
  end
  self:check_chain(op)
  if op.idle and op.tile ~= "spread" then
    self:error(self:key("idle"), "idle: only a spread op can have tasks without a tile")
  end
  local plain = inline and inline.reference or reference
  if not reference or inline and not inline.reference then
    self:error(nil, "no //@reference section")
  elseif plain.text == "" then
    self:error({ file = self.name, line = plain.line - 1, col = 1 }, "//@reference is empty")
  end
  local known = {}
  for _, field in ipairs(op.params) do
    known[#known + 1] = field.type == "i32" and field.name or nil
  end
  for _, field in ipairs(op.task) do
    known[#known + 1] = field.name
  end
  table.move(AMBIENT, 1, #AMBIENT, #known + 1, known)
  for _, way in ipairs({ "reads", "writes" }) do
    op[way] = self:read_regions(way, raw[way], known, op)
  end
  for _, region in ipairs(op.optional and op.writes or {}) do
    if region.posts then self:error(region.pos, "writes '%s': who may sleep cannot post it", region.name) end
  end
  if raw.tile then
    self:check_tile(op, taken)
  end
  op.cost = raw.cost or "0"
  op.eval_cost = self:read_expression("cost", op.cost, known)
  self:derive_fields(op, taken)
  op.all = { reads = op.reads, writes = op.writes }
  self:derive_sync(op)
  return op
end

--- Reads one op file given as text; `name` is how messages call it. read_file: a file below the root, for pipelines.
--- wide: for steps with more columns than an MMA has.
function M.parse(name, text, diag, read_file, wide)
  local file = setmetatable({ name = name, text = text, diag = diag, read_file = read_file, wide = wide }, File)
  return file:read()
end

--- Decides what op tables leave to the schedule. claim, exchange: the schedule's; sequential: whether the layers are a
--- chain; kept: whether SMs keep the residual in registers.
function M.settle(registry, claim, exchange, sequential, kept)
  local chain = sequential and exchange ~= "validated" -- of exchanges whose fences wait for loads
  for _, op in ipairs(registry.list) do
    local plays = op.in_chain and (chain and op.in_chain or "help")
    if plays then op.roles, op.wait, op.signal = { [plays] = true }, plays, plays end
    for _, way in ipairs({ "reads", "writes" }) do
      op[way] = {}
      for _, region in ipairs(op.all[way]) do
        region.role = plays or region.role
        if not (kept and region.unkept) then table.insert(op[way], region) end
      end
    end
    number_fields(op)
    local writes, posted, others = 0, 0, 0
    for _, way in ipairs({ op.reads, op.writes }) do
      for _, region in ipairs(way) do
        region.posted = exchange == "validated" and (region.posts or region.awaits) or false
        region.returned = exchange == "validated" and region.returns or false
        region.waited = exchange == "validated" and region.scope == "sm" and region.awaits or false
        if way == op.writes and region.global then
          writes, posted = writes + 1, posted + (region.posted and 1 or 0)
        end
        if region.global and not region.posted then others = others + 1 end
      end
    end
    op.eased = op.may_ease or op.chained and chain
    op.relaxed = writes > 0 and posted == writes
    op.hinted = exchange == "validated" and others == 0
    if op.may_claim == "schedule" then
      op.claim = claim[op.claim_key] ~= "static" and "queue" or nil
      for _, region in ipairs(op.writes) do region.claim = region.may_claim and op.claim ~= nil end
    end
  end
end

--- The SM-local buffers that several roles use: { [name] = true }. They are in shared memory, have two copies and an
--- instance number in the descriptor; the others are registers of one role.
function M.shared_buffers(registry)
  local role_of, shared = {}, {}
  for _, op in ipairs(registry.list) do
    for _, way in ipairs({ op.reads, op.writes }) do
      for _, r in ipairs(way) do
        if r.scope == "sm" then
          if role_of[r.name] and role_of[r.name] ~= r.role then shared[r.name] = true end
          role_of[r.name] = role_of[r.name] or r.role
        end
      end
    end
  end
  return shared
end

-- Who reads what another role leaves on its SM waits for it in every launch.
local function check_sleepers(registry, diag)
  local shared = M.shared_buffers(registry)
  for _, op in ipairs(registry.list) do
    for _, r in ipairs(op.optional and op.writes or {}) do
      if r.scope and shared[r.name] then
        diag:error(r.pos, "writes '%s': other roles wait for it, and an optional op may sleep", r.name)
      end
    end
  end
end

-- A point names one place.
local function check_points(registry, diag)
  registry.point = {}
  for _, op in ipairs(registry.list) do
    for _, point in ipairs(op.points) do
      local other = registry.point[point.name]
      if other then
        diag:error({ file = op.file, line = 1, col = 1 }, "points: '%s' is a point of op '%s' too", point.name,
          other.name)
      end
      registry.point[point.name] = op
    end
  end
end

-- What takes an op's place must be there.
local function check_wide(registry, diag)
  for _, op in ipairs(registry.list) do
    if op.wide and not registry.by_name[op.wide] then
      diag:error({ file = op.file, line = 1, col = 1 }, "wide: there is no op '%s'", op.wide)
    end
  end
end

--- Whether a step of so many columns has more than one MMA takes.
function M.is_wide(columns)
  return columns > M.TILE_COLUMNS
end

--- Requires: nothing. Leaves: the registry of all op files below root, for steps of so many columns (8 where not
--- given), registry.point[name] = the op that has it; mistakes in diag.
function M.load(root, diag, columns)
  local wide = M.is_wide(columns or M.TILE_COLUMNS)
  local registry, found = { list = {}, by_name = {} }, { step = {}, prefill = {} }
  local names = {}
  for _, file in ipairs(assert(host.list(root .. "/templates/ops"))) do
    names[#names + 1] = file:match("^(.*)%.cu$")
  end
  table.sort(names)
  for _, name in ipairs(names) do
    local shown = ("templates/ops/%s.cu"):format(name)
    local text, why = host.read(root .. "/" .. shown)
    local op
    if text then
      op = M.parse(shown, text, diag, function(path)
        return host.read(root .. "/" .. path)
      end, wide)
    else
      diag:error({ file = shown, line = 1, col = 1 }, "cannot read it: %s", why)
    end
    if op then found[op.launch][#found[op.launch] + 1] = op end
  end
  for _, launch in ipairs(M.LAUNCHES) do
    for _, op in ipairs(found[launch]) do
      registry.list[#registry.list + 1] = op
      op.opcode = #registry.list
      registry.by_name[op.name] = op
    end
  end
  if #found.step > MOST then
    diag:error(nil, "templates/ops: %d ops, but a set of opcodes in the kernel has room for %d", #found.step, MOST)
  end
  check_sleepers(registry, diag)
  check_points(registry, diag)
  check_wide(registry, diag)
  return registry
end

local function region_text(region)
  local where
  if region.scope then
    where = "sm"
  elseif region.launch then
    where = region.launch .. " launch"
  elseif region.may_claim and not region.lo then
    where = "claimed"
  else
    where = ("%s .. %s"):format(region.lo, region.hi) .. (region.step and " step " .. region.step or "")
    where = where .. (region.adds and ", added to" or "") .. (region.may_claim and ", or claimed" or "")
  end
  return ("%s[%s] by %s"):format(region.name, where, region.role)
end

--- The text of `nmkgen ops`.
function M.table(registry)
  local out = {}
  local function line(format, ...)
    out[#out + 1] = format:format(...)
  end
  for i, op in ipairs(registry.list) do
    if i > 1 then
      line("")
    end
    line("%d %s: %s", op.opcode, op.name, op.summary)
    local fields, params, roles = {}, {}, {}
    for _, field in ipairs(op.fields) do
      fields[#fields + 1] = ("%d %s"):format(field.word, field.name)
    end
    for _, param in ipairs(op.params) do
      params[#params + 1] = param.name
    end
    for _, role in ipairs(M.ROLES) do
      if op.roles[role] then
        roles[#roles + 1] = role .. (op.supplied[role] and " (" .. op.supplied[role] .. ")" or "")
      end
    end
    line("  tiles    %s", op.tile)
    line("  fields   %s", table.concat(fields, ", "))
    if #params > 0 then
      line("  params   %s", table.concat(params, ", "))
    end
    line("  roles    %s", table.concat(roles, ", "))
    if op.inline then
      line("  inline   at points of other ops too")
    end
    for _, point in ipairs(op.points) do
      line("  point    %s %s", point.name, point.type)
    end
    line("  waits    in %s", op.wait)
    if op.launch ~= "step" then
      line("  launch   %s", op.launch)
    end
    if op.in_chain then
      line("  in chain by %s", op.in_chain)
    end
    if op.optional then
      line("  sleeps   unless a column wants it")
    end
    if op.signal then
      line("  signals  from %s, %d per task", op.signal, op.arrivals)
    end
    for _, region in ipairs(op.reads) do
      line("  reads    %s", region_text(region))
    end
    for _, region in ipairs(op.writes) do
      line("  writes   %s", region_text(region))
    end
    for _, test in ipairs(op.tests) do
      line("  test     %s", test.name)
    end
  end
  return table.concat(out, "\n") .. "\n"
end

return M
