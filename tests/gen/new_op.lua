-- `nmkgen new-op`: what it writes is an op that the registry takes as it is, and what it refuses leaves no file.
local t = dofile("tests/gen/helper_spec.lua")

local root = t.folder .. "/root"
assert(os.execute(("mkdir -p %s && cp -r gen templates specs %s/"):format(root, root)))
local nmkgen = ("NMK_ROOT=%s build/nmkgen "):format(root)
local OPS = root .. "/templates/ops/"

for _, kind in ipairs({ "elementwise", "task" }) do
  local name = "my_" .. kind
  local status, out, err = t.run(nmkgen .. "new-op " .. name .. " --like " .. kind)
  t.same(kind, status .. out .. err,
    ("0templates/ops/%s.cu: an op that passes its tests; make test-op OP=%s runs them\n"):format(name, name))
  t.case(kind .. " has its name", t.exists(OPS .. name .. ".cu")
    and t.read(OPS .. name .. ".cu"):find(('name%%s*= "%s"'):format(name)), "no")
  status, out, err = t.run(nmkgen .. "ops")
  t.case(kind .. " is an op with a test", status == 0 and out:find("%d+ " .. name .. ": ") and out:find("\n  test "),
    err)
  status, _, err = t.run(nmkgen .. "check specs/nmc-toy.yaml --try " .. name)
  t.same(kind .. " can be inserted as its table says", status .. err, "0")
end
t.same("elementwise is the default", select(2, t.run(nmkgen .. "new-op halve && cat " .. OPS .. "halve.cu"))
  :match('pipeline = "(%w+)"'), "elementwise")

local status, out, err = t.run(("%snew-op thirds -o %s/elsewhere"):format(nmkgen, t.folder))
t.case("another folder", status == 0 and out:find(t.folder .. "/elsewhere/thirds.cu", 1, true) == 1
  and t.exists(t.folder .. "/elsewhere/thirds.cu") and not t.exists(OPS .. "thirds.cu"), err)

local function refuses(name, arguments, want)
  local code, printed, why = t.run(nmkgen .. "new-op " .. arguments)
  t.same(name, code .. printed .. why, "1nmkgen: " .. want .. "\n")
  local file = arguments:match("^(%S+)")
  t.case(name .. ": no file", file == "residual" or file == "thirds" or not t.exists(OPS .. file .. ".cu"),
    "it is there")
end
refuses("an op's name", "residual", "new-op: 'residual': there is an op of that name, templates/ops/residual.cu")
refuses("a file that exists", ("thirds -o %s/elsewhere"):format(t.folder),
  ("new-op: %s/elsewhere/thirds.cu exists already"):format(t.folder))
local LETTERS = "a name begins with a lower-case letter and has only lower-case letters, digits and _"
refuses("capitals", "Halve", "new-op: 'Halve': " .. LETTERS)
refuses("a path", "a/b", "new-op: 'a/b': " .. LETTERS)
refuses("a digit in front", "2nd", "new-op: '2nd': " .. LETTERS)
refuses("a digit at the end", "cut2",
  "new-op: 'cut2': a name does not end in a digit: the second node of an op is called so")
refuses("two _", "a__b", "new-op: 'a__b': a name has no _ at its end or beside another")
refuses("the end of a list", "end", "new-op: 'end': the name is nmkgen's own")
refuses("a long name", ("a"):rep(25), ("new-op: '%s': a name has at most 24 letters"):format(("a"):rep(25)))
refuses("an unknown kind", "third --like elemental", "--like: there is no 'elemental', did you mean 'elementwise'?")

-- A table that asks for more memory than tables need is told with its line.
local halve = t.read(OPS .. "halve.cu")
t.write(OPS .. "halve.cu", (halve:gsub("(\n *summary *= )[^\n]*", '%1("x"):rep(1 << 30),', 1)))
local line = select(2, halve:match("^(.-)\n *summary"):gsub("\n", "")) + 2
status, out, err = t.run("ulimit -v 1000000; " .. nmkgen .. "ops")
t.same("a table that fills the memory", status .. out .. err,
  ("1templates/ops/halve.cu:%d:1: the table takes too much memory\n"):format(line))
t.write(OPS .. "halve.cu", halve)

-- A file that lies there already, whatever it holds, is not written over.
t.write(OPS .. "broken.cu", "")
status, out, err = t.run(nmkgen .. "new-op other")
t.case("not among broken op files", status == 1 and out == ""
  and err:find("templates/ops/broken.cu:1:1: no /*@op", 1, true), err)

t.done()
