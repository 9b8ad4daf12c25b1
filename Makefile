# Rewarm: everything a developer types. Each target works as the first command after a clone: it makes .venv with a
# Python of 3.11 or newer, installs what it needs, and only then runs. No compiler is needed.
#   make demo PYTHON=/usr/bin/python3.12    picks the interpreter

VENV    := .venv
BIN     := $(VENV)/bin
PYTHON  ?= python3 python3.14 python3.13 python3.12 python3.11 python
SUITES  := crash lab soak scale engine lmcache sglang transformers browser
BENCHES := $(filter-out _%,$(patsubst benchmarks/%.py,%,$(wildcard benchmarks/*.py)))
PIP     := $(BIN)/python -m pip install --quiet --prefer-binary

.DEFAULT_GOAL := help
.PHONY: help demo test test-long coverage check lint types format fuzz lab-two-media lab-nvmeof engine-env lmcache-env sglang-env transformers-env install dev clean $(SUITES:%=test-%) $(BENCHES:%=bench-%)

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 18
	@echo "test-SUITE        the tests with a marker: $(SUITES)"
	@echo "bench-NAME        a benchmark of benchmarks/: $(or $(BENCHES),none yet)"

demo: $(VENV)/.core ## the main job on this machine's disk, in two minutes and at most 3 GB
	@$(BIN)/rewarm demo

test: $(VENV)/.dev ## the quick suite, under three minutes on two cores
	@$(BIN)/python -m pytest -q

coverage: $(VENV)/.dev ## branch coverage of the store by its quick tests, three minutes; below 95 % fails
	@$(BIN)/python -m pytest -q tests/store tests/report/test_metrics.py --cov=rewarm.store --cov-branch \
	    --cov-report=term:skip-covered --cov-fail-under=95

check: lint types test ## everything a change must pass

lint: $(VENV)/.dev ## formatting, lint and the rules of the house
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check --no-cache .
	@$(BIN)/python -m pytest -q tests/test_house.py

types: $(VENV)/.dev ## mypy, strict
	@$(BIN)/mypy

format: $(VENV)/.dev ## rewrite the sources in the house format
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

# Exit code 5 of pytest: no test carries this marker yet.
$(SUITES:%=test-%): test-%: $(VENV)/.dev
	@$(BIN)/python -m pytest -q -m $* || { code=$$?; [ $$code -eq 5 ] && echo "no test carries the marker $*"; }

test-browser: $(VENV)/.browser

$(BENCHES:%=bench-%): bench-%: $(VENV)/.dev
	@$(BIN)/python benchmarks/$*.py $(ARGS)

fuzz: $(VENV)/.dev ## a million hostile inputs for the parsers of frames, logs, pool files and segments: a minute
	@$(BIN)/python -m tests.store.fuzz.run $(ARGS)

lab-two-media: $(VENV)/.dev ## two throttled media, every restore order, the published table in small: root, 4 minutes
	@$(BIN)/python lab/two-media/run.py $(ARGS)

lab-nvmeof: $(VENV)/.dev ## a guest with a real NVMe-oF target, link and drive faults, two hosts: root, ten minutes
	@lab/nvmeof/run $(ARGS)

test-long: $(VENV)/.dev ## the crash suite with every repetition it has, 1,000 power losses among them: twenty minutes
	@REWARM_LONG=1 $(BIN)/python -m pytest -q -m crash $(ARGS)

soak: $(VENV)/.dev ## thirty minutes of 24 processes on three hosts under random faults; needs root and GlusterFS
	@REWARM_SOAK_S=1800 $(BIN)/python -m pytest -q -m soak $(ARGS)

engine-env: ## vLLM for the CPU in .venv-vllm, for make test-engine: two minutes, 4 GB
	@tests/engine/environment.sh

lmcache-env: ## LMCache for the CPU in .venv-lmcache, for make test-lmcache: a minute, 0.7 GB and torch
	@tests/lmcache/environment.sh

sglang-env: ## SGLang's host pools in .venv-sglang, for make test-sglang: makes the engine's first
	@tests/sglang/environment.sh

transformers-env: ## Transformers in .venv-transformers, for make test-transformers
	@tests/transformers/environment.sh

install: $(VENV)/.core ## the package alone, into .venv
dev: $(VENV)/.dev ## the package and the tools of this Makefile, into .venv

clean: ## remove the environments, caches and build results
	rm -rf $(VENV) .venv-* build dist out .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage .coverage.*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.core: pyproject.toml | $(VENV)/.made
	@echo "installing rewarm into $(VENV)"
	@$(PIP) -e .
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/.made
	@echo "installing rewarm and its development tools into $(VENV)"
	@$(PIP) -e '.[dev]'
	@touch $(VENV)/.core $@

# The report's tests drive the Chromium of the system; this is what drives it (170 MB, so not in .dev).
$(VENV)/.browser: pyproject.toml | $(VENV)/.dev
	@$(PIP) -e '.[browser]'
	@touch $@

# A usable .venv is kept as it is; one that an interrupted run left behind is made again.
$(VENV)/.made:
	@if $(BIN)/python -c '$(NEW_ENOUGH)' 2>/dev/null && $(BIN)/python -m pip --version >/dev/null 2>&1; \
	then touch $@; exit 0; fi; \
	for candidate in $(PYTHON); do \
	    if $$candidate -c '$(NEW_ENOUGH)' 2>/dev/null; then found=$$candidate; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	    echo "error: no Python of 3.11 or newer among: $(PYTHON)" >&2; \
	    echo "       install one, or name it: make PYTHON=/path/to/python3.12 ..." >&2; exit 2; \
	fi; \
	if ! $$found -c 'import venv, ensurepip' 2>/dev/null; then \
	    echo "error: $$found cannot make a virtual environment: its modules venv and ensurepip are missing" >&2; \
	    echo "       Debian and Ubuntu keep them in a package of their own: apt install python3-venv" >&2; exit 2; \
	fi; \
	echo "making $(VENV) with $$($$found --version)"; \
	$$found -m venv --clear $(VENV) && touch $@

NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
