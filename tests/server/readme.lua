-- README and CONTRIBUTING against the programs: flags, endpoints, fields, metrics, commands and files.  What one side
-- has and the other has not is named.
local t = dofile("tests/gen/helper_spec.lua")
local README, CONTRIBUTING = t.read("README.md"), t.read("CONTRIBUTING.md")
local TOY = "build/nmc-toy/"

local function help_of(program)
  local _, out, err = t.run(program .. " --help")
  return out .. err
end

-- The rows of the README's table whose head is `head`: { { "cell", ... }, ... }.
local function rows_of(head)
  local rows, inside = {}, false
  for line in README:gmatch("[^\n]*") do
    if line:sub(1, #head) == head then
      inside = true
    elseif inside and line:sub(1, 1) ~= "|" then
      break
    elseif inside and not line:find("^|%-") then
      local row = {}
      for cell in line:gsub("\\|", "\0"):gmatch("|([^|]*)") do row[#row + 1] = cell end
      rows[#rows + 1] = row
    end
  end
  return rows
end

-- Adds what `pattern` finds between backticks.
local function quoted(set, text, pattern)
  for code in text:gmatch("`([^`]*)`") do
    local word = code:match(pattern)
    if word then set[word] = true end
  end
  return set
end

local function found(text, pattern, set)
  set = set or {}
  for word in text:gmatch(pattern) do set[word] = true end
  return set
end

local function missing(from, other)
  local list = {}
  for word in pairs(from) do
    if not other[word] then list[#list + 1] = word end
  end
  table.sort(list)
  return table.concat(list, ", ")
end

-- Two sets with something in them and nothing in one alone.
local function agree(name, documented, real)
  local extra, lacking = missing(documented, real), missing(real, documented)
  t.case(name, next(real) ~= nil and extra == "" and lacking == "",
    ("only in README: %s; not in README: %s"):format(extra, lacking))
end

-- ---- flags of nmk-serve
local help, flags = help_of(TOY .. "nmk-serve"), {}
for _, row in ipairs(rows_of("| flag |")) do quoted(flags, row[1], "^(%-%-[%w-]+)") end
agree("README has the flags of nmk-serve", flags, found(help, "\n  (%-%-[%w-]+)"))

-- A default that README states as plain words or numbers is the help's.
for _, row in ipairs(rows_of("| flag |")) do
  local names, defaults = {}, {}
  for name in row[1]:gmatch("%-%-[%w-]+") do names[#names + 1] = name end
  for value in row[2]:gmatch("[^,]+") do defaults[#defaults + 1] = value:match("^%s*(.-)%s*$") end
  for i, name in ipairs(#names == #defaults and names or {}) do
    if defaults[i]:find("^[%w.]+$") and name ~= "--enable-prefix-caching" then
      local said = help:match("\n  " .. name:gsub("%-", "%%-") .. " [^\n]*%(([^()]*)%)\n")
      t.same("the default of " .. name, defaults[i], said)
    end
  end
end

-- ---- endpoints, fields, metrics: from the tables in the source
local endpoints = {}
for _, row in ipairs(rows_of("| endpoint |")) do
  for path in row[1]:gmatch("`(/[^`]*)`") do endpoints[path:gsub("NAME$", "*")] = true end
end
agree("README has the endpoints", endpoints,
  found(t.read("server/api.c"), '%] = {"(/[^"]*)", NMK_HTTP_'))

local taken, refused, documented, declined = {}, {}, {}, {}
for name, rest in t.read("server/request.c"):gmatch('\n    {"([%w_]+)", *([^\n]*)') do
  if rest:find("^[A-Z|]+, *[A-Z]+,") then
    (rest:find("= refuse") and refused or taken)[name] = true
  end
end
for name in pairs(taken) do refused[name] = nil end -- elsewhere it is taken
for _, row in ipairs(rows_of("| fields |")) do
  if row[1]:find("^ refused ") then quoted(declined, row[2], "^[%w_]+$")
  else quoted(documented, row[1], "^[%w_]+$") end
end
agree("README has the fields of requests", documented, taken)
agree("README has the fields that are refused", declined, refused)

-- ---- JSON schemas: keywords and formats, from the tables in the source
local keywords, schema = {}, t.read("server/schema.c")
for _, row in ipairs(rows_of("| keywords of |")) do quoted(keywords, row[2], "^[$%w-]+$") end
local known = found(schema, '{"([$%w]+)", [%u_ |]+}')
for _, list in ipairs({ "types", "formats" }) do
  for name in schema:match("} " .. list .. "%[%] = {(.-)\n?};"):gmatch('{"([%w-]+)",') do
    known[name] = list == "formats" or nil
  end
end
keywords["x-"] = nil
agree("README has the keywords of schemas", keywords, known)

local metrics, names = {}, found(t.read("server/metrics.c"), '"(vllm:[%w_]+)"')
for _, row in ipairs(rows_of("| metrics |")) do quoted(metrics, row[2], "^[%w]+:[%w_]+$") end
agree("README has the metrics", metrics, found(t.read("server/metrics.c"), '"(nmk:[%w_]+)"', names))

-- ---- commands: what is shown to be typed exists
local helps = {
  nmkgen = help_of("build/nmkgen"), ["nmk-run"] = help_of(TOY .. "nmk-run"), ["nmk-serve"] = help,
  ["nmk-compile"] = help_of(TOY .. "nmk-compile"), ["nmk-chat"] = help_of("build/nmk-chat"),
  ["nmk-bench"] = help_of("build/nmk-bench"),
}
local unknown, seen = {}, 0
for line in README:gmatch("\n    (build/[^\n]*)") do
  local program = line:match("^build/[^ ]*(nmk[%w-]*)") or "?"
  for flag in line:gmatch("[ %[](%-%-?[%w-]+)") do
    seen = seen + 1
    local shown = (" " .. (helps[program] or "")):gsub("[%[%],]", " ")
    if not shown:find("%s" .. flag:gsub("%-", "%%-") .. "%s") then unknown[program .. " " .. flag] = true end
  end
end
t.case("the flags in README's commands are known", seen > 0 and not next(unknown), missing(unknown, {}))

local targets, wanted = {}, {}
for name in ("\n" .. t.read("Makefile")):gmatch("\n([%w-]+):") do targets[name] = true end
for _, text in ipairs({ README, CONTRIBUTING }) do
  for name in text:gmatch("[`\n] *make ([a-z-]+)[` \n]") do wanted[name] = true end
end
local absent = missing(wanted, targets)
t.case("the targets of make are there", next(wanted) ~= nil and absent == "", absent)

-- What the head of the Makefile offers, and what the texts tell of.
local offered = found(t.read("Makefile"):match("^.-\n\n"), "make ([a-z-]+)%f[%s;:]")
local untold = missing(offered, found(README .. CONTRIBUTING, "make ([a-z-]+)%f[^%w-]"))
t.case("what make offers is told", offered["test-tsan"] and offered.fuzz and untold == "", untold)

-- ---- the example for OpenCode is of this server and this model
local opencode = t.read("examples/opencode.json")
local model = t.read("specs/north-mini-code.yaml"):match("\nmodel: (%S+)")
t.case("examples/opencode.json is of this server", opencode:find('"baseURL": "http://127.0.0.1:8000/v1"', 1, true) and
  opencode:find(('"%s": {'):format(model), 1, true) and
  opencode:find(('"model": "nmk/%s"'):format(model), 1, true), opencode)
t.same("and JSON", t.run("build/nmkgen --lua " .. t.write(t.folder .. "/json.lua",
  'local diag = require("diag").new() assert(require("json").load("examples/opencode.json", diag)) diag:stop()')), 0)

-- ---- files and folders of the project that the texts name
local gone, named = {}, 0
for _, text in ipairs({ README, CONTRIBUTING }) do
  for path in (text:gsub("%]%(([%w_./-]+)%)", "`%1`")):gmatch("`([%w_]+/[%w_./-]*)`") do
    local first = path:match("^[^/]+")
    if first == "gen" or first == "templates" or first == "specs" or first == "runtime" or first == "server" or
      first == "bench" or first == "tests" or first == "examples" then
      named = named + 1
      if not t.exists(path) then gone[path] = true end
    end
  end
end
t.case("the files that the texts name are there", named > 0 and not next(gone), missing(gone, {}))

t.done()
