-- For tests of `nmkgen init`: checkpoint folders made from the toy's config.json.
local t = dofile("tests/gen/helper_spec.lua")

local M = { t = t, config = t.read("examples/nmc-toy/config.json") }

--- `text` with `old`, plain text that stands there once, in another form; and where.
function M.replace(text, old, new)
  local from, to = text:find(old, 1, true)
  assert(from and not text:find(old, to, true), "not there once: " .. old)
  return text:sub(1, from - 1) .. new .. text:sub(to + 1), from
end

--- The shapes of the toy's tensors as JSON, by name.
M.shapes = {}
for _, file in ipairs({ "model-00001-of-00002", "model-00002-of-00002" }) do
  local bytes = t.read("examples/nmc-toy/" .. file .. ".safetensors")
  local header = bytes:sub(9, 8 + string.unpack("<i8", bytes))
  for name, shape in header:gmatch('"([%w_.]+)":%s*{"dtype":%s*"BF16",%s*"shape":%s*(%b[])') do
    M.shapes[name] = shape
  end
end

--- A folder with these files, { name = text }; its path.
function M.folder(name, files)
  local path = t.folder .. "/" .. name
  t.run(("rm -rf '%s' && mkdir -p '%s'"):format(path, path))
  for file, text in pairs(files) do t.write(path .. "/" .. file, text) end
  return path
end

--- A safetensors file: tensors are { name, dtype, shape, ... as JSON }; data are not there.
function M.safetensors(entries)
  local parts = {}
  for i, e in ipairs(entries) do
    parts[i] = ('"%s":{"dtype":"%s","shape":%s,"data_offsets":[0,0]}'):format(e[1], e[2], e[3])
  end
  local header = "{" .. table.concat(parts, ",") .. "}"
  return string.pack("<i8", #header) .. header
end

--- Exit status and what is said on both streams, the folder's path as DIR.
function M.init(dir, flags)
  local status, out, err = t.run(("build/nmkgen init '%s' %s"):format(dir, flags or ""))
  local function short(text)
    local from, to = text:find(dir, 1, true)
    while from do
      text = text:sub(1, from - 1) .. "DIR" .. text:sub(to + 1)
      from, to = text:find(dir, from, true)
    end
    return text
  end
  return status, short(out), short(err)
end

return M
