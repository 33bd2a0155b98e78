-- What plan.txt says, in short, of every model in specs/ but the toy, whose golden is whole: tests/golden/plans.txt.
-- Reads what `make` emitted.  `make golden` (NMK_GOLDEN=write) rewrites the file; read the diff.
local GOLDEN = "tests/golden/plans.txt"

dofile("tests/helper_host.lua")
local read = require("host").read

-- The lines of a plan that do not change with every other schedule: head, traffic, kinds of layers, sizes.
local KEPT = {
  "^%S+ on %S+: ", "^batch ", "^distinct ", "^[%l_]+ .* [kMG]?B$", "^bound", "^at ", "^%d+ layers, shown",
  "^Weight arena", "^%S+ +at KiB",
}

local function summary(text)
  local lines = {}
  for line in text:gmatch("([^\n]*)\n") do
    for _, pattern in ipairs(KEPT) do
      if line:find(pattern) then
        lines[#lines + 1] = (line:gsub(" at KiB +%d+ ", ""))
        break
      end
    end
  end
  return table.concat(lines, "\n") .. "\n"
end

local parts = {}
local names = io.popen("ls specs/*.yaml")
for path in names:lines() do
  local name = path:match("([^/]*)%.yaml$")
  local plan = name ~= "nmc-toy" and read(("build/%s/plan.txt"):format(name))
  if plan then
    parts[#parts + 1] = { name = name, text = summary(plan) }
  elseif name ~= "nmc-toy" then
    print(("not ok - golden plan of %s: build/%s/plan.txt is not there: make"):format(name, name))
    os.exit(1)
  end
end
names:close()

if os.getenv("NMK_GOLDEN") == "write" then
  local file = assert(io.open(GOLDEN, "wb"))
  for i, part in ipairs(parts) do file:write(i > 1 and "\n" or "", part.text) end
  file:close()
  print("wrote " .. GOLDEN)
  os.exit(0)
end

local failed, golden = false, {}
for part in ((read(GOLDEN) or "") .. "\n"):gmatch("(.-\n)\n") do golden[part:match("^%S*") or ""] = part end
for _, part in ipairs(parts) do
  local before = golden[part.name] or ""
  if before == part.text then
    print("ok - golden plan of " .. part.name)
  else
    failed = true
    local old, new = before:gmatch("[^\n]*"), part.text:gmatch("[^\n]*")
    local a, b = old(), new()
    while a == b and b do a, b = old(), new() end
    print(("%s\n  golden: %s\n  now:    %s"):format(part.name, a or "(end)", b or "(end)"))
    print(("not ok - golden plan of %s: differs (make golden rewrites it)"):format(part.name))
  end
end
os.exit(not failed)
