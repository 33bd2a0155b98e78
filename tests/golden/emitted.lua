-- What the generator itself writes for the toy, against the files in tests/golden/nmc-toy.  Text that is copied from a
-- template is left out, and so are the hash and the numbers of #line: they change with every edit of a template.
-- `make golden` (NMK_GOLDEN=write) rewrites the files; read the diff.

local MODEL = "nmc-toy"
local FILES = {
  "megakernel.cu", "abi.h", "encoder.c", "refvm.c", "op_tests.h", "plan.txt",
  "prefill/megakernel.cu", "prefill/abi.h", "prefill/encoder.c", "prefill/refvm.c", "prefill/plan.txt",
}
local made, golden = "build/tests/golden", "tests/golden/" .. MODEL

dofile("tests/helper_host.lua")
local read = require("host").read

--- The lines of an emitted file without what came from templates.
local function own(text)
  local lines, copied = {}, false
  for line in text:gmatch("([^\n]*)\n") do
    local from = line:match('^#line %d+ "(.*)"$')
    if from then
      copied = from:find("^templates/") ~= nil
      if copied then lines[#lines + 1] = "... " .. from end
    elseif not copied then
      lines[#lines + 1] = (line:gsub("0x%x%x%x%x%x%x%x%x%x%x%x%x%x%x%x%xull", "0xHASH"))
    end
  end
  return lines
end

local function first_difference(a, b)
  for i = 1, math.max(#a, #b) do
    if a[i] ~= b[i] then return i end
  end
end

local command = ("mkdir -p %s/prefill && build/nmkgen specs/%s.yaml -o %s >%s/log 2>&1 && " ..
  "build/nmkgen specs/%s.yaml --launch prefill -o %s/prefill >%s/log 2>&1"):format(made, MODEL, made, made, MODEL, made,
  made)
if not os.execute(command) then
  io.write(read(made .. "/log") or "")
  print("not ok - golden: nmkgen refuses specs/" .. MODEL .. ".yaml")
  os.exit(1)
end

local write, failed = os.getenv("NMK_GOLDEN") == "write", false
if write then os.execute("mkdir -p " .. golden .. "/prefill") end
for _, name in ipairs(FILES) do
  local now = own(assert(read(made .. "/" .. name), name))
  local path = golden .. "/" .. name
  if write then
    local file = assert(io.open(path, "wb"))
    file:write(table.concat(now, "\n"), "\n")
    file:close()
    print("wrote " .. path)
  else
    local before = {}
    for line in (read(path) or ""):gmatch("([^\n]*)\n") do before[#before + 1] = line end
    local at = first_difference(before, now)
    if at then
      failed = true
      print(("%s:%d\n  golden: %s\n  now:    %s"):format(path, at, before[at] or "(end)", now[at] or "(end)"))
      print(("not ok - golden %s: differs from line %d on (make golden rewrites it)"):format(name, at))
    else
      print("ok - golden " .. name)
    end
  end
end
os.exit(not failed)
