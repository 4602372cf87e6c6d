#!/usr/bin/env bash
# Brings the whole cluster up in containers, scales it, streams answers through it, and takes it down again.
#
# Wants a Docker engine with Compose (DOCKER_HOST says which). Optional: CA_FILE, a certificate bundle for pip within
# the build; WHEELS_DIR, a folder of wheels; TORCH, what pip shall install as torch.
set -euo pipefail
cd "$(dirname "$0")"

compose=(docker compose --project-name kvasir-test -f docker-compose.yml)
if [ -n "${CA_FILE:-}" ]; then
  export CA_FILE WHEELS_DIR=${WHEELS_DIR:-$(mktemp -d)}
  compose+=(-f docker-compose.offline.yml)
fi
export KVASIR_PORT=${KVASIR_PORT:-18000} KVASIR_KV_CACHE_MEMORY=${KVASIR_KV_CACHE_MEMORY:-256MiB}
url=http://127.0.0.1:$KVASIR_PORT

finish() {
  status=$?
  if [ "$status" != 0 ]; then
    "${compose[@]}" ps --all
    "${compose[@]}" logs --no-color --tail 40
  fi
  "${compose[@]}" down --volumes --timeout 40
  exit "$status"
}
trap finish EXIT

# wait_for SECONDS WHAT COMMAND...
wait_for() {
  local deadline=$((SECONDS + $1)) what=$2
  shift 2
  until "$@"; do
    [ $SECONDS -lt $deadline ] || { echo "not in time: $what" >&2; return 1; }
    sleep 0.5
  done
  echo "==> $what"
}

is_ready() { curl -fsS -o /dev/null "$url/ready" 2>/dev/null; }

num_nodes_is() { [ "$(curl -fsS "$url/metrics" | awk '/^kvasir:nodes[{ ]/ {sum += $NF} END {print sum + 0}')" = "$1" ]; }

# stream_answer TEXT: the answer must come in pieces and end well
stream_answer() {
  local body answer
  body=$(printf '{"model": "smollm2-135m-instruct", "stream": true, "temperature": 0, "max_tokens": 24,
    "messages": [{"role": "user", "content": "%s"}]}' "$1")
  answer=$(curl -fsSN --max-time 120 "$url/v1/chat/completions" -H 'Content-Type: application/json' -d "$body")
  [ "$(grep -c '^data: {' <<<"$answer")" -ge 3 ] && grep -q '^data: \[DONE\]' <<<"$answer" || {
    echo "no whole answer: $answer" >&2
    return 1
  }
  echo "==> streamed: $(grep -o '"content": *"[^"]*"' <<<"$answer" | cut -d'"' -f4 | tr -d '\n')"
}

"${compose[@]}" config -q
"${compose[@]}" build
"${compose[@]}" up --detach --wait --wait-timeout 700
wait_for 120 "ready with one prefill and one decode node" is_ready
wait_for 60 "2 nodes joined" num_nodes_is 2
stream_answer "What is the capital of France?"

"${compose[@]}" up --detach --wait --wait-timeout 700 --scale prefill=2 --scale decode=3
wait_for 120 "5 nodes joined" num_nodes_is 5
for question in "Name a colour." "Name a river." "Name a bird." "Count to five." "What is two plus two?" "Who wrote Faust?"; do
  stream_answer "$question"
done

# A replica that is killed costs nobody an answer.
docker kill "$("${compose[@]}" ps -q decode | head -n 1)" >/dev/null
stream_answer "What is the largest planet?"
echo "==> compose test passed"
