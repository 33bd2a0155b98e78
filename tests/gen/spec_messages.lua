-- Every file of tests/gen/bad is a spec with mistakes, and its last lines, `#! LINE:COL: message`, are all that nmkgen
-- says of it, in order.  Nothing is written and the exit status is 1.
local t = dofile("tests/gen/helper_spec.lua")

local _, names = t.run("ls tests/gen/bad/*.yaml")
local count, distinct = 0, {}
for path in names:gmatch("%S+") do
  local want = {}
  for line in t.read(path):gmatch("#! ([^\n]*)") do
    want[#want + 1] = ("%s:%s\n"):format(path, line)
    local text = line:gsub("^%d+:%d+: ", "")
    if not distinct[text] then distinct[text], count = true, count + 1 end
  end
  local output = t.folder .. "/build"
  local status, out, err = t.run(("build/nmkgen %s -o %s"):format(path, output))
  local name = path:match("bad/(.*)%.yaml")
  t.same(name, err, table.concat(want))
  t.case(name .. " writes nothing", status == 1 and out == "" and not t.exists(output),
    ("status %d, printed <%s>"):format(status, out))
end
t.case("at least 25 distinct mistakes", count >= 25, ("only %d"):format(count))

-- Bytes that a fixture cannot hold.
local function message(name, bytes, want)
  local path = t.write(t.folder .. "/x.yaml", bytes)
  local _, _, err = t.run("cd " .. t.folder .. ' && "$OLDPWD/build/nmkgen" check x.yaml')
  t.same(name, err, want)
  os.remove(path)
end
message("not UTF-8", "model: a\nfamily: \xff\n", "x.yaml:2:9: not UTF-8 text: invalid leading UTF-8 octet\n")
message("UTF-8 cut short", "model: \xc3\xa4\xc3", "x.yaml:1:9: not UTF-8 text: incomplete UTF-8 octet sequence\n")
message("control character", "model: a\1\n", "x.yaml:1:9: not UTF-8 text: control characters are not allowed\n")
message("nesting", ("["):rep(200) .. ("]"):rep(200), "x.yaml:1:1: expected a map, got a list\n"
  .. "x.yaml:1:66: nested deeper than 64 levels\n")
message("nesting that libyaml would take hours for", ("["):rep(200000), "x.yaml:1:501: nested deeper than 64 levels\n")
message("a large file", ("#"):rep(300000), "x.yaml:1:1: more than 262144 bytes: no spec is that long\n")
-- As many unknown keys as a spec has room for: compared with the known ones, they would take ten seconds.
local unknown = {}
for i = 1, 18000 do unknown[i] = ("  key%d: 1\n"):format(i) end
t.write(t.folder .. "/many.yaml", "model: a\nfamily: llama\nshape:\n" .. table.concat(unknown))
local code, _, said = t.run(("ulimit -t 3; build/nmkgen check %s/many.yaml"):format(t.folder))
t.case("many unknown keys", code == 1 and said:find("shape.key20: unknown key, known are: ", 1, true)
  and said:find("and 17%d%d%d more\n$"), said:sub(-300))
message("unclosed quote", 'model: "tiny\n',
  "x.yaml:2:1: found unexpected end of stream, while scanning a quoted scalar in line 1\n")

local function missing(name, path, reason)
  local status, _, err = t.run("build/nmkgen check " .. path)
  t.same(name, err .. status, ("%s:1:1: cannot be read: %s\n1"):format(path, reason))
end
missing("missing file", "specs/none.yaml", "No such file or directory")
missing("folder", "specs/families", "Is a directory")

-- Keys are looked up, not compared with all before them.
local keys = {}
for i = 1, 20000 do keys[i] = ("k%d: 1\n"):format(i) end
t.write(t.folder .. "/keys.yaml", "shape:\n  x:\n    " .. table.concat(keys, "    "))
t.case("many keys", t.run("ulimit -t 5; build/nmkgen check " .. t.folder .. "/keys.yaml") == 1)

-- An alias bomb is read in no time: aliases share one tree.
local bomb = { "a: &a [x, x, x, x, x, x, x, x, x]\n" }
for i = 1, 30 do
  local this, last = string.char(97 + i // 26) .. string.char(97 + i % 26), i == 1 and "a" or nil
  last = last or string.char(97 + (i - 1) // 26) .. string.char(97 + (i - 1) % 26)
  bomb[#bomb + 1] = ("%s: &%s [%s]\n"):format(this, this, ("*" .. last .. ", "):rep(8) .. "*" .. last)
end
t.write(t.folder .. "/bomb.yaml", table.concat(bomb))
local status = t.run("ulimit -v 1000000; timeout 5 build/nmkgen check " .. t.folder .. "/bomb.yaml")
t.case("alias bomb", status == 1, "status " .. status)

t.done()
