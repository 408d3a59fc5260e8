#!/usr/bin/env bash
# The report's story, end to end, on this machine: both historic faults, clean at light load, wrong
# under pressure; then one fix after the other, and which detector would have seen it.
#
#   STANCHION_TRACES=/path/to/traces runs/scaling_pain.sh FOLDER [REQUESTS_AN_ARM]
#
# FOLDER gets the runs, and page.html and page.md. A run that was cut off goes on when the same
# command is given again. 2,000 requests an arm, unless told.
set -euo pipefail
cd "$(dirname "$0")/.."
out="${1:?usage: runs/scaling_pain.sh FOLDER [REQUESTS_AN_ARM]}"
requests="${2:-2000}"
trace="${STANCHION_TRACES:?say where the public traces are}/weka_claude_code_sessions.jsonl.gz"
python="${PYTHON:-.venv/bin/python}"
mkdir -p "$out"
cluster="--prefill 2 --decode 1 --integrity off --prefill-deadline 2 --kv-memory 0.1 --host-cache 0.6"
cluster="$cluster --set lab.slow_transfer_ms=20 --set lab.slow_load=0/index:0.5,1/index:0.5,2/index:0.5,3/index:0.5,4/index:0.5,5/index:0.5"
sed -e "s|@TRACE@|$trace|; s|@REQUESTS@|$requests|; s|@BLOCK@|$requests|; s|@PRESSURE@|20|; s|@CLUSTER@|$cluster|" \
	runs/scaling_pain.toml >"$out/plan.toml"
"$python" -m stanchion.cli.main ablate "$out/plan.toml" --out "$out/runs"
"$python" -m stanchion.cli.main report "$out/runs" --out "$out/page"
