#!/usr/bin/env bash
# The report's story, end to end, on this machine: both historic faults, clean at light load, wrong
# under pressure; then one fix after the other, and which detector would have seen it.
#
#   STANCHION_TRACES=/path/to/traces runs/scaling_pain.sh FOLDER [REQUESTS_AN_ARM]
#
# FOLDER gets the runs, page.html and page.md, and zero.txt: the arm of both fixes once more, 30,000
# requests on the hash model. A run that was cut off goes on when the same command is given again.
# 2,000 requests an arm, unless told, in blocks of 350, since pressure is requests a second.
set -euo pipefail
cd "$(dirname "$0")/.."
out="${1:?usage: runs/scaling_pain.sh FOLDER [REQUESTS_AN_ARM]}"
requests="${2:-2000}"
trace="${STANCHION_TRACES:?say where the public traces are}/weka_claude_code_sessions.jsonl.gz"
python="${PYTHON:-.venv/bin/python}"
mkdir -p "$out"
block=$((requests < 350 ? requests : 350))
cluster="--prefill 2 --decode 1 --integrity off --prefill-deadline 4 --kv-memory 0.1 --host-cache 0.6"
cluster="$cluster --set lab.slow_transfer_ms=20 --set lab.slow_load=0/index:0.5,1/index:0.5,2/index:0.5,3/index:0.5,4/index:0.5,5/index:0.5"
sed -e "s|@TRACE@|$trace|; s|@REQUESTS@|$requests|; s|@BLOCK@|$block|; s|@PRESSURE@|60|; s|@CLUSTER@|$cluster|" \
	runs/scaling_pain.toml >"$out/plan.toml"
"$python" -m stanchion.cli.main ablate "$out/plan.toml" --out "$out/runs"
"$python" -m stanchion.cli.main report "$out/runs" --out "$out/page"
# Prompts are short there, and so are the delays' shares: a pool that is small keeps the tiers busy.
"$python" -m stanchion.cli.main verify --prefill 2 --decode 1 --requests $((15 * requests)) --concurrency 32 \
	--prefill-deadline 2 --kv-memory 0.001 --host-cache 0.01 \
	--set lab.slow_transfer_ms=20 --set "lab.slow_load=*:0.5" | tee "$out/zero.txt"
