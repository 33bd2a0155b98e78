#!/bin/bash
# examples/machines: HAProxy before three servers on loopback. Sessions stay with a server, one that is killed under load
# costs the answers that had begun there, one that drains costs none; and the unit of systemd is one.  Skipped without
# HAProxy; `make test-balancer` installs it.
cd "$(dirname "$0")/../.." || exit 2
. tests/helper.sh
machines=examples/machines
pids=()
trap 'kill -9 "${pids[@]}" 2>/dev/null; wait 2>/dev/null; rm -rf "$out"' EXIT

if command -v systemd-analyze >/dev/null; then
  sed 's,/usr/local/bin/nmk-serve,/bin/true,' $machines/nmk-serve@.service >"$out/nmk-serve@0.service"
  said=$(systemd-analyze verify "$out/nmk-serve@0.service" 2>&1 | grep nmk-serve)
  result "systemd takes the unit" $((${#said} == 0)) "$said"
else
  echo "skip - systemd takes the unit: no systemd-analyze"
fi
help=$(build/nmc-toy/nmk-serve --help)
unknown=$(grep '^ExecStart=' $machines/nmk-serve@.service | grep -o -- ' --[a-z-]*' | while read -r flag; do
  grep -q -- "^  $flag " <<<"$help" || echo "$flag"
done)
result "the unit's flags are known" $((${#unknown} == 0)) "$unknown"
if ! command -v haproxy >/dev/null; then
  echo "skip - a balancer before three servers: no haproxy (make test-balancer)"
  exit $failed
fi

# serve N: the port of server N is ${port[N]}.
serve() {
  build/nmc-toy/nmk-serve --checkpoint examples/nmc-toy --device cpu --port 0 2>"$out/log.$1" &
  server[$1]=$! pids+=($!)
  for _ in {1..400}; do
    port[$1]=$(sed -n 's,.*listening url=http://127.0.0.1:\([0-9]*\)/v1.*,\1,p' "$out/log.$1")
    [ -n "${port[$1]}" ] && return
    sleep 0.05
  done
  result "server $1 starts" 0 "$(tail -n 1 "$out/log.$1")"
  exit 1
}
for n in 0 1 2; do serve $n; done

# A free port: another one if somebody has it.
for _ in {1..20}; do
  front=$((20000 + RANDOM % 12000))
  sed "s,bind :8000,bind 127.0.0.1:$front,; s,127.0.0.1:8010,127.0.0.1:${port[0]},; s,127.0.0.1:8011,127.0.0.1:${port[1]},
    s,127.0.0.1:8012,127.0.0.1:${port[2]}," $machines/haproxy.cfg >"$out/haproxy.cfg"
  haproxy -db -f "$out/haproxy.cfg" >"$out/haproxy.log" 2>&1 &
  balancer=$!
  sleep 1
  kill -0 $balancer 2>/dev/null && break
done
pids+=("$balancer")
url=http://127.0.0.1:$front
for _ in {1..100}; do
  grep -q '"ok"' <<<"$(curl -s "$url/health")" && break
  sleep 0.1
done
result "the balancer serves" $(($? == 0)) "$(tail -n 3 "$out/haproxy.log")"

# ask SESSION PROMPT
ask() {
  curl -s "$url/v1/completions" ${1:+-H "x-session-affinity: $1"} -d "{\"prompt\":\"$2\",\"max_tokens\":3}" >>"$out/answers"
}
finished() { grep -c 'request finished' "$out/log.$1"; }
# Which servers have answered since the counts in `before`.
note() { before="$(finished 0) $(finished 1) $(finished 2)"; }
used() {
  local n=0 count list=
  for count in $before; do
    [ "$(finished $n)" -gt "$count" ] && list="$list$n"
    n=$((n + 1))
  done
  echo "$list"
}

spread=
for session in alice bob carol dave erin frank; do
  note
  for i in 1 2 3; do ask $session "$session says $i"; done
  where=$(used)
  [ ${#where} = 1 ] || result "a session stays with its server" 0 "$session was on $where"
  spread="$spread$where"
done
result "sessions stay with a server each" $((${#spread} == 6)) "$spread"
result "and are spread" $(($(fold -w1 <<<"$spread" | sort -u | wc -l) > 1)) "all on ${spread:0:1}"

# Without the field: what begins alike goes to one server, where its beginning is cached.
long=$(printf 'all that we know of rivers and of cities %.0s' {1..120})
note
for i in 1 2 3; do ask "" "$long $i"; done
where=$(used)
result "conversations that begin alike stay together" $((${#where} == 1)) "on $where"
cached=$(grep 'request finished' "$out/log.${where:0:1}" | tail -n 1 | grep -o 'cached_tokens=[0-9]*')
result "where their beginning is cached" $((${cached#*=} > 100)) "$cached"

# load NAME REQUESTS: prompts that begin differently, six at a time.
load() {
  build/nmk-bench serve --quiet --url "$url/v1" --requests "$2" --concurrency 6 --prompt-tokens 12 --output-tokens 12 \
    --ignore-eos --text --seed "$RANDOM" --save "$out/$1.json" >"$out/$1.log" 2>&1
}
# busy N: until server N has something to do, and more runs than the load's first request alone.
now() { curl -s "http://127.0.0.1:${port[$1]}/metrics" | sed -n 's/^vllm:num_requests_running{.*} //p'; }
busy() {
  local all n
  for _ in {1..400}; do
    all=0
    for n in 0 1 2; do all=$((all + 0$(now $n))); done
    [ $all -gt 2 ] && [ "0$(now "$1")" -gt 0 ] && return
    sleep 0.02
  done
}
figure() { grep -o "\"$2\":[0-9]*" "$out/$1.json" | cut -d: -f2; }

load killed 40 &
running=$!
busy 1
kill -9 "${server[1]}"
wait "${server[1]}" 2>/dev/null # the shell would tell of it later
wait $running
lost=$(figure killed failed) lost=${lost:-99}
result "a server that is killed costs what it had begun" $((lost <= 6 && $(figure killed completed) == 40 - lost)) \
  "$(tail -n 3 "$out/killed.log")"
load after 12
result "then all is answered" $(($(figure after completed) == 12)) "$(tail -n 3 "$out/after.log")"

load drained 40 &
running=$!
busy 2
kill -TERM "${server[2]}"
wait "${server[2]}"
result "a server that drains ends well" $(($? == 0)) "it does not"
wait $running
result "and costs nothing" $(($(figure drained completed) == 40)) "$(tail -n 3 "$out/drained.log")"

exit $failed
