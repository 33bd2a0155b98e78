-- What is emitted depends on the sources alone: not on the run, the locale, the folder or how a path is written.  Lua
-- seeds its hashes anew in every process, so an order that leaks from pairs() differs between these runs.
local t = dofile("tests/gen/helper_spec.lua")

-- Two copies of the sources, which nobody edits meanwhile.
local TOP = io.popen("pwd"):read("l") .. "/" .. t.folder
local A, B = TOP .. "/a", TOP .. "/another one"
t.run(("mkdir '%s' '%s' && cp -r gen templates specs '%s' && cp -r gen templates specs '%s'"):format(A, B, A, B))
t.run(("mkdir '%s/build' && cp build/nmkgen '%s/build'"):format(B, B))

-- Generates into a folder of its own; its checksums, a line per file.
local runs = 0
local function sums(command)
  runs = runs + 1
  local folder = ("%s/%d"):format(TOP, runs)
  local status, _, err = t.run(("%s -o '%s'"):format(command, folder))
  local _, list = t.run(("cd '%s' && cksum *"):format(folder))
  return status == 0 and list or err
end

for _, model in ipairs({ "nmc-toy", "north-mini-code" }) do
  local spec = ("specs/%s.yaml"):format(model)
  local nmkgen = ("NMK_ROOT='%s' build/nmkgen '%s/%s'"):format(A, A, spec)
  local want = sums(nmkgen)
  local _, files = want:gsub("\n", "")
  t.case(model .. " is emitted", files >= 5 and want:find("megakernel.cu") ~= nil, want)
  t.same(model .. " again", sums(nmkgen), want)
  if model == "nmc-toy" then
    for _, locale in ipairs({ "C.UTF-8", "de_DE.UTF-8", "tr_TR.UTF-8" }) do
      t.same(model .. " in " .. locale, sums(("LC_ALL=%s LANG=%s %s"):format(locale, locale, nmkgen)), want)
    end
    t.same(model .. " with Lua's variables", sums("LUA_PATH=/x LUA_INIT='error()' " .. nmkgen), want)
    t.same(model .. " from another folder",
      sums(("P=$PWD; cd '%s/specs' && NMK_ROOT=.. \"$P/build/nmkgen\" ./nmc-toy.yaml"):format(A)), want)
    t.same(model .. " from another root", sums(("cd / && '%s/build/nmkgen' '%s/%s'"):format(B, B, spec)), want)
  end
end

t.done()
