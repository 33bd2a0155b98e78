-- A checkpoint's folder in Hugging Face format, as far as `nmkgen init` looks: which files there are, and the names,
-- shapes and types of the tensors.  No weight is read.
local host = require("host")
local json = require("json")

local M = {}

local HEADER_BYTES_MAX = 16 << 20       -- what host.part gives at once
local SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

local function exists(path) return host.realpath(path) ~= nil end

-- Names of a folder's files that are there.
local function present(dir, names)
  local list = {}
  for _, name in ipairs(names) do
    if exists(dir .. "/" .. name) then list[#list + 1] = name end
  end
  return list
end

-- A list of sizes as a plain list; nil where it is something else.
local function sizes(node)
  if not node or node.kind ~= "array" then return nil end
  for _, item in ipairs(node.items) do
    if math.type(item.value) ~= "integer" or item.value < 0 then return nil end
  end
  return json.plain(node)
end

--- The tensors of one file: { name, dtype, shape } in `list`.  False after a message.
local function read_header(path, list, diag)
  local function fail(fmt, ...)
    diag:error({ file = path }, fmt, ...)
    return false
  end
  local head, size = host.part(path, 0, 8)
  if not head then return fail("cannot be read: %s", size) end
  if #head < 8 then return fail("not safetensors: %d bytes long", #head) end
  local bytes = string.unpack("<i8", head)
  if bytes < 2 or bytes > size - 8 then
    return fail("not safetensors: a header of %d bytes in a file of %d", bytes, size)
  elseif bytes > HEADER_BYTES_MAX then
    return fail("a header of %d bytes, at most %d are read", bytes, HEADER_BYTES_MAX)
  end
  local text = host.part(path, 8, bytes)
  local root = text and json.parse(text, path .. " (header)", diag)
  if not root then return false end
  if root.kind ~= "object" then return fail("not safetensors: the header is not an object") end
  for _, item in ipairs(root.items) do
    local tensor = item.value
    if item.key ~= "__metadata__" then
      local dtype, shape = tensor.by and tensor.by.dtype, sizes(tensor.by and tensor.by.shape)
      if not dtype or dtype.kind ~= "string" or not shape then
        return fail("not safetensors: tensor %s has no dtype and shape", item.key)
      end
      list[#list + 1] = { name = item.key, dtype = dtype.value, shape = shape, file = path }
    end
  end
  return true
end

-- The names in an index, and the files that it speaks of, in order of their first mention.
local function read_index(path, diag)
  local root = json.load(path, diag)
  local map = root and root.by.weight_map
  if not root then return nil end
  if not map or map.kind ~= "object" or #map.items == 0 then
    diag:error(json.pos(map or root), "weight_map is missing or empty")
    return nil
  end
  local names, files, seen = {}, {}, {}
  for i, item in ipairs(map.items) do
    local file = item.value.value
    if item.value.kind ~= "string" or file:find("/", 1, true) or not file:find("^[^.].*%.safetensors$") then
      diag:error(json.pos(item.value), "tensor %s: expected the name of a .safetensors file, got %s", item.key,
        json.text(item.value))
      return nil
    end
    names[i] = { name = item.key }
    if not seen[file] then seen[file], files[#files + 1] = true, file end
  end
  return names, files
end

--- The tensors of a folder: { list = { name, dtype, shape, file }, by = by name, from = what they were read from }.
--- Without the files that an index names there are only names.  nil where there is nothing, or after a message.
function M.tensors(dir, diag)
  local list, from = {}, SINGLE
  if exists(dir .. "/" .. SINGLE) then
    if not read_header(dir .. "/" .. SINGLE, list, diag) then return nil end
  elseif exists(dir .. "/" .. INDEX) then
    local names, files = read_index(dir .. "/" .. INDEX, diag)
    if not names then return nil end
    local there = present(dir, files)
    if #there == 0 then
      list, from = names, INDEX .. " alone"
    else
      from = ("%d files of safetensors"):format(#files)
      for _, file in ipairs(files) do
        if not read_header(dir .. "/" .. file, list, diag) then return nil end
      end
    end
  else
    return nil
  end
  local by = {}
  for _, tensor in ipairs(list) do by[tensor.name] = tensor end
  return { list = list, by = by, from = from, shapes = list[1] ~= nil and list[1].shape ~= nil }
end

--- Which of the tokenizer's files are there.
function M.tokenizer_files(dir)
  local there = {}
  for _, name in ipairs(present(dir, { "tokenizer.json", "tokenizer.model", "vocab.json", "chat_template.jinja",
                                       "tokenizer_config.json" })) do
    there[name] = true
  end
  return there
end

--- A name for the model: the folder's own, or of a folder of the Hugging Face cache the model's; nil where it has none.
function M.model_name(dir)
  local real = host.realpath(dir) or dir
  local name = real:match("models%-%-[^/]*%-%-([^/]+)/snapshots/[^/]+$") or real:match("([^/]+)$") or ""
  name = name:lower():gsub("[^%w._-]", "-"):gsub("^[^%w]+", "")
  return name ~= "" and name or nil
end

return M
