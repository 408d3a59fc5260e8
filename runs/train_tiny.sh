#!/usr/bin/env bash
# Makes the embedded checkpoint, stanchion/model/tiny, from the Python standard library alone.
#
#   runs/train_tiny.sh [minutes of training, 80] [seed, 20]
#
# Needs the `engine` and `dev` extras and two CPU cores for about 110 minutes. It can be stopped at
# any time and started again: finished steps are skipped, training goes on where it was last saved.
set -euo pipefail
cd "$(dirname "$0")/.."

minutes=${1:-80}
seed=${2:-20}
work=.tiny
out=stanchion/model/tiny
python=${PYTHON:-python}

# One thread to a worker: two pools of two threads on two cores are far slower than two threads.
export OMP_NUM_THREADS=1
# Tensors of some megabytes come and go at every step; without this each of them is mapped, zeroed
# and unmapped by the kernel.
export MALLOC_MMAP_THRESHOLD_=4000000000 MALLOC_TRIM_THRESHOLD_=8000000000
export MALLOC_TOP_PAD_=268435456

step() {
    nice -n 19 "$python" "runs/tiny/$1.py" "${@:2}"
}

mkdir -p "$work"
step corpus --work "$work" --seed "$seed"
step check
step train --work "$work" --seed "$seed" --minutes "$minutes" --resume
step tune --work "$work" --seed $((seed + 1)) --minutes 8 --resume
step export --work "$work" --out "$out"
step evaluate --work "$work" --out "$out" --seed $((seed + 2))
step card --work "$work" --out "$out" --seed "$seed"
