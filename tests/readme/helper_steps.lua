-- A section of README.md as a shell script: its ```sh blocks as they stand, its ```KIND PATH blocks written to PATH.
--   lua5.4 helper_steps.lua README.md "Add an opcode in ten minutes"
local path, title = arg[1], arg[2]

local inside, found, block = false, false, nil
io.write("set -e\n")
for line in io.lines(path) do
  local fence, info = line:match("^(```+)(.*)$")
  if block then
    if fence and info == "" then
      if block == "file" then io.write("NMK_END\n") end
      block = nil
    else
      io.write(line, "\n")
    end
  elseif fence and inside then
    local file = info:match("^%l+ (%S+)$")
    block = info == "sh" and "sh" or file and "file" or "other"
    assert(block ~= "other", "a block that is neither sh nor a file: " .. info)
    found = true
    if file then io.write(("mkdir -p $(dirname %s); cat >%s <<'NMK_END'\n"):format(file, file)) end
  elseif line:match("^#+ ") then
    inside = line:match("^#+ (.*)$") == title
  end
end
assert(found, "README.md has no section '" .. title .. "' with steps")
