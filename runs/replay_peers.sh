#!/usr/bin/env bash
# Runs AIPerf and guidellm over the traces of `stanchion bench replay`, against its stub, each in an
# environment of its own (1.2 GB and 1.6 GB), and writes what `bench replay` puts beside us:
#
#   runs/replay_peers.sh peers.json [FOLDER for the environments] [--rates 50 --seconds 5 --runs 1]
#   STANCHION_PEERS=peers.json stanchion bench replay
set -euo pipefail
out=${1:?runs/replay_peers.sh OUT.json [FOLDER]}
home=${2:-${TMPDIR:-/tmp}/stanchion-peers}
here=$(cd "$(dirname "$0")/.." && pwd)
python=${PYTHON:-$here/.venv/bin/python}
mkdir -p "$home"

environment() { # NAME PACKAGES...: guidellm's torch would be a CUDA build if it came by itself
  local name=$1
  shift
  [ -e "$home/$name/.ready" ] && return
  "$python" -m venv "$home/$name"
  for package in "$@"; do
    "$home/$name/bin/pip" install --quiet --disable-pip-version-check "$package"
  done
  touch "$home/$name/.ready"
}
environment aiperf aiperf==0.13.0
environment guidellm torch==2.13.0 guidellm==0.8.1

# Both want a tokenizer by a name of Hugging Face's: ours is laid into a cache of their own.
revision=0123456789012345678901234567890123456789
cache=$home/hf/hub/models--local--tiny
mkdir -p "$cache/refs" "$cache/snapshots/$revision"
printf %s "$revision" > "$cache/refs/main"
cp "$here"/stanchion/model/tiny/*.json "$here"/stanchion/model/tiny/*.jinja "$cache/snapshots/$revision/"

exec "$python" "$here/runs/replay_peers.py" --home "$home" --json "$out" "${@:3}"
