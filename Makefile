# Every target sets up first; that takes seconds when nothing changed. `ARGS` is handed on: make test ARGS='-m "not engine"'
SHELL := /bin/bash
PYTHON_PACKAGES := ropewalk.agents ropewalk.cluster ropewalk.kernels ropewalk.scheduler ropewalk.workloads
BIN := .venv/bin
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint typecheck bench clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

setup: ## make .venv and the embedded models ready (ROPEWALK_EXTRA=gpu for CUDA)
	@scripts/setup.sh

demo: setup ## plain vLLM against Ropewalk on the same work, on this machine
	$(BIN)/ropewalk demo $(ARGS)

test: setup ## all tests; the quick ones alone: make test ARGS='-m "not engine"'
	$(BIN)/python -m pytest $(ARGS)

lint: setup ## style
	$(BIN)/ruff check
	$(BIN)/ruff format --check

typecheck: setup ## types; strict where a package imports neither Ray nor vLLM
	MYPYPATH=build/links $(BIN)/mypy $(addprefix -p ,$(PYTHON_PACKAGES))

bench: setup ## everything under benchmarks/, as ratios measured in one run
	@set -e; for name in $(sort $(patsubst benchmarks/%.py,%,$(wildcard benchmarks/[a-z]*.py))); do \
	  echo "== $$name"; $(BIN)/python -m benchmarks.$$name $(ARGS); done

clean: ## remove what was built or measured; .venv and downloaded models stay
	rm -rf out .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find build -mindepth 1 -maxdepth 1 ! -name links -exec rm -rf {} + 2>/dev/null || true
	find agents cluster kernels scheduler workloads tests -name __pycache__ -prune -exec rm -rf {} +
