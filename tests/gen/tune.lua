-- nmkgen tune with a bench of paper whose best schedule is known (helper_bench.sh), and the tuning file by hand.
local t = dofile("tests/gen/helper_spec.lua")
local SPEC, TUNING = t.folder .. "/toy.yaml", t.folder .. "/toy.tuning.yaml"

local toy = t.read("specs/nmc-toy.yaml")
local function fresh(extra)
  os.execute(("rm -rf %s/work %s/count %s"):format(t.folder, t.folder, TUNING))
  t.write(SPEC, toy .. (extra or ""))
end

local function tune(flags, environment)
  return t.run(("NMK_FAKE_COUNT=%s/count %s build/nmkgen tune %s -o %s/work --batch 1,8 --context 2048 %s"):format(
    t.folder, environment or "", SPEC, t.folder, flags or ""))
end
local BENCH = "--bench 'bash tests/gen/helper_bench.sh'"

-- What is left to tune: most in the first search, few keys in the others, which are about something else.
local MOST = [[
schedule:
  order: [norm, router, qkv, route, attention, combine, up, o_proj, down, residual]
  reuse_buffers: true
]]
local FEW = MOST .. [[
  split: { chunks_min: 16, chunks_max: 32, pages_per_chunk: 4, pages_per_long_chunk: 8 }
  ring_stages: 12
]]

-- The search finds the best caps and pages, whatever the noise, and takes nothing that the noise alone made better.
fresh(MOST)
local _
local status, out, err = tune(BENCH .. " --budget 500")
t.case("the search ends well", status == 0 and err == "" and out:find("written: " .. TUNING, 1, true), out .. err)
local text = t.exists(TUNING) and t.read(TUNING) or ""
t.case("it finds the best", text:find("\n  in_flight: [2, 3, 3, 3, 4, 4, 4, 4]\n", 1, true)
  and text:find("\n    pages_per_chunk: 2\n", 1, true), text .. out)
t.case("it takes nothing else", not text:find("ring_stages") and not text:find("order") and not text:find("placement")
  and not text:find("reuse") and not text:find("chunks_m"), text)
t.case("the file says how it was found", text:find("a machine of paper", 1, true)
  and text:find("nmkgen tune " .. SPEC, 1, true) and text:find("ms a step at 1, 8 rows, 2048 tokens each: ", 1, true),
  text)
t.run("build/nmkgen variant " .. SPEC .. " -o " .. t.folder .. "/tuned")
local hash = t.read(t.folder .. "/tuned/lists"):match("\nwords_hash 0x(%x+)\n")
t.case("the file names the lists that were measured", hash and text:find(", lists " .. hash .. ", by: ", 1, true),
  tostring(hash) .. " " .. text)
-- Where every run is known from the journal nothing is built on the way, and the file names the same lists.
os.remove(TUNING)
status, out, err = tune(BENCH .. " --budget 500")
text = t.exists(TUNING) and t.read(TUNING) or ""
t.case("the same command on a whole journal", status == 0 and text:find(", lists " .. hash .. ", by: ", 1, true),
  out .. err .. text)
-- spec.load uses it, the plan says so.
status, out, err = t.run("build/nmkgen plan " .. SPEC)
t.case("the plan says where a value comes from", status == 0
  and out:find("\nin_flight +%[2, 3, 3, 3, 4, 4, 4, 4%] +[^\n]*toy%.tuning%.yaml:%d+\n")
  and out:find("\nsplit%.pages_per_chunk +2 +[^\n]*toy%.tuning%.yaml:%d+\n")
  and out:find("\nring_stages +12 +default\n"), out .. err)
status, out = t.run("build/nmkgen plan --untuned " .. SPEC)
t.case("--untuned", status == 0 and out:find("\nin_flight +%[3, 3, 3, 3, 4, 4, 4, 4%] +default\n"), out)
status, out = t.run("build/nmkgen plan --set in_flight=6 " .. SPEC)
t.case("--set goes before", status == 0
  and out:find("\nin_flight +%[6, 6, 6, 6, 6, 6, 6, 6%] +%-%-set in_flight\n"), out)

-- The same seed gives the same candidates in the same order.
local function candidates(of)
  local list = {}
  for line in of:gmatch("[^\n]+") do
    if line:find("^estimate ") then list[#list + 1] = line end
  end
  return table.concat(list, "\n")
end
fresh(FEW)
tune(BENCH .. " --budget 500")
local journal = t.read(t.folder .. "/work/journal")
fresh(FEW)
tune(BENCH .. " --budget 500")
t.same("the same again", t.read(t.folder .. "/work/journal"), journal)
t.case("there were candidates", #candidates(journal) > 0 and journal:find("placement.rule=random placement.seed=%d%d"),
  journal:sub(1, 2000))

-- Interrupted, it goes on where it was and ends alike.
fresh(FEW)
status, out, err = tune(BENCH .. " --budget 500", "NMK_FAKE_STOP=9")
t.case("an interrupt", status == 1 and not t.exists(TUNING)
  and err == ("nmkgen: interrupted; the same command goes on from %s/work/journal\n"):format(t.folder), out .. err)
t.write(t.folder .. "/count", "8\n")
status, out, err = tune(BENCH .. " --budget 500")
t.case("it goes on", status == 0 and out:find("8 runs known", 1, true), out .. err)
t.case("and finds the same", t.exists(TUNING)
  and t.read(TUNING):find("in_flight: [2, 3, 3, 3, 4, 4, 4, 4]", 1, true), out)

-- The budget ends it; what the spec sets stays.
fresh("schedule:\n  in_flight: 2\n")
status, out, err = tune(BENCH .. " --budget 1")
t.case("the budget", status == 0 and out:find("the time is up", 1, true), out .. err)
t.case("the spec's own keys are not tuned", out:find("not tuned: in_flight, which [^\n]*toy.yaml:%d+ sets\n"), out)

-- Without a GPU: by estimates, and nothing written unless asked.
fresh(FEW)
status, _, err = tune(BENCH, "NMK_FAKE_FAIL=1")
t.same("a bench that fails", status .. err,
  "1nmkgen: bash tests/gen/helper_bench.sh: bench-decode: no CUDA driver\n")
status, out, err = tune("--estimate-only")
t.case("estimates alone", status == 0 and out:find("nothing written: ", 1, true) and not t.exists(TUNING), out .. err)
status, out, err = tune("--estimate-only --write-estimate")
t.case("estimates, written", status == 0 and t.exists(TUNING)
  and t.read(TUNING):find("# estimated, not measured", 1, true), out .. err)
status, out, err = t.run("build/nmkgen check " .. SPEC)
t.case("what was written is a schedule", status == 0, out .. err)

-- With everything left to tune two orders promise to be better than each other, by what they brought elsewhere.
fresh()
status, out, err = t.run(("timeout 60 build/nmkgen tune %s -o %s/work --estimate-only"):format(SPEC, t.folder))
local base = tonumber(out:match("estimated as it is: [%d.]+, ([%d.]+) ms"))
local best = tonumber(out:match("estimated best: [%d.]+, ([%d.]+) ms"))
t.case("estimates alone come to an end", status == 0 and base and best and best < base, status .. out:sub(-400) .. err)

-- Another target's part and its comments stay.
fresh(FEW)
t.write(TUNING, "# ours\nh100:\n  # a line\n  ring_stages: 10\n")
tune("--estimate-only --write-estimate")
text = t.read(TUNING)
t.case("other targets stay", text:find("# ours\nh100:\n  # a line\n  ring_stages: 10\nh200:\n", 1, true) == 1, text)
tune("--estimate-only --write-estimate")
local parts = select(2, t.read(TUNING):gsub("h200:\n", ""))
t.case("a target has one part", parts == 1, t.read(TUNING))

-- Bad tuning files: the message names the file and the place, and nothing runs.
local function bad(name, content, want)
  fresh()
  t.write(TUNING, content)
  local code, printed, why = t.run("build/nmkgen check " .. SPEC)
  t.same(name, code .. printed .. why, ("1%s:%s\n"):format(TUNING, want))
end
bad("an unknown target", "h20:\n  ring_stages: 8\n", "1:1: unknown target 'h20', did you mean 'h200'?")
bad("an unknown key", "h200:\n  ring_stage: 8\n", "2:3: schedule.ring_stage: unknown key, did you mean 'ring_stages'?")
bad("a value out of range", "h200:\n  ring_stages: 13\n",
  "2:16: schedule.ring_stages: expected an integer from 4 to 12, got '13'")
bad("columns", "h200:\n  columns: 4\n",
  "2:12: h200.columns: how many columns a step has is for the spec to say, not for tuning")
bad("another target's mistake", "h100:\n  split: { pages: 3 }\n",
  "2:12: h100.split.pages: unknown key, did you mean 'own_pages'?")
bad("no map", "[1, 2]\n", "1:1: expected a map from targets to keys of `schedule:`")
bad("a part that is no map", "h200: 3\n", "1:7: h200: expected a map of keys of `schedule:`")
bad("no YAML", "h200: [\n", "2:1: did not find expected node content, while parsing a flow node in line 2")
bad("a contradiction", "h200:\n  ring_stages: 4\n  in_flight: 5\n",
  "3:14: schedule.in_flight: must be at most ring_stages; it is [5, 5, 5, 5, 5, 5, 5, 5], "
  .. "where schedule.ring_stages is 4")
fresh("schedule: 3\n")
t.write(TUNING, "h200:\n  ring_stages: 8\n")
status, out, err = t.run("build/nmkgen check " .. SPEC)
t.case("a schedule that is no map is the spec's mistake",
  status == 1 and err:find("toy.yaml:%d+:11: schedule: expected a map"), out .. err)

-- Wrong use.
fresh(FEW)
status, _, err = t.run("build/nmkgen tune " .. SPEC .. " --batch 1,9")
t.case("a batch that is too large", status == 1 and err:find("--batch 1,9: expected numbers from 1 to 8", 1, true), err)
status, _, err = t.run("build/nmkgen plan --budget 3 " .. SPEC)
t.case("a flag of another command", status == 2 and err:find("--budget is a flag of tune", 1, true), err)
t.done()
