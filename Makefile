# Everything runs in .venv, which `make setup` makes. Two words are enough: make serve, make test.

VENV := .venv
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready
# The first Python from 3.11 on; 3.11 first, since that is what torch is pinned for.
FIND_PYTHON = for p in python3.11 python3.12 python3.13 python3; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done
ARGS ?=

.PHONY: help setup nixl serve test soak lint check bench sim hunt clean

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(READY)  ## make .venv with everything that serving, tests and benchmarks need

# torch first: what depends on plain "torch" would otherwise bring a CUDA build of several GB.
$(READY): pyproject.toml
	@python=$$($(FIND_PYTHON)); test -n "$$python" || \
		{ echo "stanchion needs Python 3.11 or newer; none was found on PATH" >&2; exit 1; }; \
	echo "setting up $(VENV) with $$python (about two minutes the first time)"; \
	$(PYTHON) -m pip --version >/dev/null 2>&1 || "$$python" -m venv --clear $(VENV)
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check torch==2.13.0
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check -e '.[engine,lab,dev]'
	@touch $@

# nixl itself asks for more than one CUDA's libraries: without its dependencies it takes the one below.
nixl: $(READY)  ## add the NIXL transport (220 MB); its tests and benchmark skip without
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check nixl-cu13==1.5.1
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps nixl==1.5.2

serve: $(READY)  ## serve the embedded model on http://127.0.0.1:8000 (ARGS="--port 9000 ...")
	@exec $(VENV)/bin/stanchion serve $(ARGS)

test: $(READY)  ## all tests but the long storms, about 10 minutes on two cores
	@$(PYTHON) -m pytest -m "not soak and not gpu" --numprocesses 2 --dist loadfile $(ARGS)

soak: $(READY)  ## the long storms; public traces are found by STANCHION_TRACES
	@$(PYTHON) -m pytest -m soak -s $(ARGS)

lint: $(READY)  ## format, lint, types
	@$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/ruff check .
	@$(VENV)/bin/mypy

check: lint  ## the same, and the tests that are quick: layers, core, KV
	@$(PYTHON) -m pytest tests/test_layers.py tests/core tests/kv tests/device/test_stream.py

bench: $(READY)  ## all benchmarks, shortened (one of them, in full: stanchion bench NAME --json FILE)
	@$(VENV)/bin/stanchion bench engine --quick
	@$(VENV)/bin/stanchion bench handoff --quick
	@$(VENV)/bin/stanchion bench tiers --quick

sim: $(READY)  ## one storm on the hash model, replayed from SEED
	@$(PYTHON) -m pytest tests/engine/test_storm.py -s -k one_seed --seed $(or $(SEED),7)

hunt: $(READY)  ## simulated clusters by the thousand (ARGS="--requests 1000000 --seed N")
	@$(PYTHON) runs/hunt.py $(ARGS)

clean:  ## remove .venv and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
