-- For tests of the command: runs build/nmkgen, keeps what it prints, counts cases.
local M = {}

-- The test's own, empty; it goes when the test is done.
M.folder = "build/tests/gen_" .. arg[0]:match("([^/]*)%.lua$")
assert(os.execute(("rm -rf %s && mkdir -p %s"):format(M.folder, M.folder)))

local function read(path)
  local file = assert(io.open(path, "rb"))
  local text = file:read("a")
  file:close()
  return text
end

M.read = read

function M.write(path, text)
  local file = assert(io.open(path, "wb"))
  file:write(text)
  file:close()
  return path
end

function M.exists(path)
  local file = io.open(path, "rb")
  if file then file:close() end
  return file ~= nil
end

--- Runs a shell command; its exit status, standard output and standard error.
function M.run(command)
  local out, err = M.folder .. "/out", M.folder .. "/err"
  local _, _, status = os.execute(("(%s) >%s 2>%s </dev/null"):format(command, out, err))
  return status, read(out), read(err)
end

local failed = false

function M.case(name, ok, why)
  if ok then
    print("ok - " .. name)
  else
    failed = true
    print(("not ok - %s: %s"):format(name, (why or "failed"):gsub("\n", " | ")))
  end
end

--- A case that wants two texts to be the same.
function M.same(name, got, want)
  M.case(name, got == want, ("got <%s>, want <%s>"):format(tostring(got), tostring(want)))
end

--- For tests inside nmkgen: a spec's model; that it has no mistakes is a case.
function M.load(path)
  local diag = require("diag").new()
  local model = require("spec").load(path, diag)
  M.same(path .. " has no mistakes", table.concat(diag:lines(), "\n"), "")
  return model
end

--- The shapes of the tensors that a checkpoint of the model must have, as JSON by name; how many; their elements.
function M.tensors(model)
  local shapes, count, parameters = {}, 0, 0
  for _, tensor in ipairs(model.family_module.tensors(model)) do
    local shape = tensor.dims == 1 and ("[%d]"):format(tensor.cols) or ("[%d, %d]"):format(tensor.rows, tensor.cols)
    for layer = tensor.layer0, tensor.layer0 + tensor.layers - 1 do
      for expert = 0, math.max(tensor.experts, 1) - 1 do
        local name = tensor.name:find("%%d") and tensor.name:format(layer, expert) or tensor.name
        assert(not shapes[name], name)
        if not tensor.twin then
          shapes[name], count, parameters = shape, count + 1, parameters + tensor.rows * tensor.cols
        end
      end
    end
  end
  return shapes, count, parameters
end

function M.done()
  os.execute("rm -rf " .. M.folder)
  os.exit(failed and 1 or 0)
end

return M
