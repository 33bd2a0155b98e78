-- For tests that run stages in plain Lua: module host, as far as loading ops and families needs what gen/main.c gives.
package.preload.host = package.preload.host or function()
  local host = { root = "." }
  function host.read(path)
    local file, why = io.open(path, "rb")
    if not file then return nil, why end
    local text = file:read("a")
    file:close()
    return text
  end
  function host.list(path)
    local names, ls = {}, assert(io.popen(("ls '%s'"):format(path)))
    for name in ls:lines() do names[#names + 1] = name end
    ls:close()
    return names
  end
  function host.bound() end -- plain Lua has none
  return host
end
