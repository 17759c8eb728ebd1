# `make demo` and `make test` set up what they need in .venv: Python 3.10 or later is all that has to be there.
PYTHON ?= python3
VENV ?= .venv
# Processes of tests: half as many again as there are cores, and one, because many tests wait for servers and compilers.
WORKERS ?= $(shell echo $$(( $$(nproc 2>/dev/null || echo 2) * 3 / 2 + 1 )))
PYTEST_ARGS ?=
BENCH_ARGS ?=
SOAK_ARGS ?= --minutes 10
PLANTED_ARGS ?=

BIN := $(VENV)/bin
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
DEMO_READY := $(VENV)/.ready-demo
DEV_READY := $(VENV)/.ready-dev

.PHONY: help setup doctor-dev demo test test-rest test-all test-exhaustive soak planted gates passed test-gpu test-gpu-mps lint format proto bench wheel clean
.DEFAULT_GOAL := help
# Hundreds of short processes import the project: they need not compile it each time, wherever this runs.
unexport PYTHONDONTWRITEBYTECODE

help: ## This list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' | awk -F'|' '{ printf "  make %-16s %s\n", $$1, $$2 }'
	@echo
	@echo "  Variables: PYTHON ($(PYTHON)), VENV ($(VENV)), WORKERS ($(WORKERS)), PYTEST_ARGS, BENCH_ARGS, SOAK_ARGS, PLANTED_ARGS"

$(DEMO_READY): pyproject.toml scripts/bootstrap.py
	@$(PYTHON) scripts/bootstrap.py --venv $(VENV) --extras server,demo
	@touch $@

$(DEV_READY): pyproject.toml scripts/bootstrap.py
	@$(PYTHON) scripts/bootstrap.py --venv $(VENV) --extras dev
	@# Bytecode of all that tests import, and Hypothesis' constants, once: else each process of tests makes its own.
	@$(BIN)/python -m pytest --collect-only -qq -p no:cacheprovider -m '' >/dev/null 2>&1 || true
	@touch $@ $(DEMO_READY)

setup: $(DEV_READY) ## Make the environment for development

doctor-dev: $(DEV_READY) ## Optional tools of development: which are missing, what they enable, how to get them
	@$(BIN)/python scripts/doctor_dev.py

demo: $(DEMO_READY) ## Start a server, run every GEMM dtype and layout and a transformer from another process
	@$(BIN)/tilewright demo
	@$(BIN)/python examples/minilm.py

test: $(DEV_READY) ## The tests of every change; need no GPU and no PyTorch
	@$(PYTEST) -m 'not extended and not exhaustive' $(PYTEST_ARGS)

test-rest: $(DEV_READY) ## The tests that `make test` leaves out, but for exhaustive sets
	@$(PYTEST) -m 'extended and not exhaustive' $(PYTEST_ARGS)

test-all: $(DEV_READY) ## The tests of both in one run, which is cheaper than two: all that continuous integration runs
	@$(PYTEST) -m 'not exhaustive' $(PYTEST_ARGS)

test-exhaustive: $(DEV_READY) ## All of the sets of which `make test-all` has a covering part; minutes
	@$(BIN)/python -m pytest -n $(WORKERS) -m exhaustive $(PYTEST_ARGS) tests

SOAK_ARGS ?= --hostile 1000000
soak: $(DEV_READY) ## Clients of all kinds, a million hostile requests among theirs, for ten minutes; 100,000 mutated bundles; 200,000 malformed requests of KServe; SOAK_ARGS="--minutes 60"
	@$(BIN)/python -m tests.soak $(SOAK_ARGS)
	@$(BIN)/python -m pytest -n 0 -rP -m exhaustive tests/native/test_fuzz_bundles.py tests/kserve/test_fuzz_requests.py

planted: $(DEV_READY) ## Plant bugs in a copy of the tree, one after the other: tests that must find them do; PLANTED_ARGS="AMD"
	@$(BIN)/python -m tests.planted $(PLANTED_ARGS)

gates: $(DEV_READY) ## Compile all kernels of the default sets, run the extended tests of kernels, and record what passed; a quarter of an hour
	@$(BIN)/python -m pytest -n 0 --gates -k shipped_sets $(PYTEST_ARGS) tests/gemm tests/conv tests/fmha tests/moe tests/kernels
	@$(MAKE) --no-print-directory passed

passed: $(DEV_READY) ## Of `make gates` the second part: extended tests of kernels, which run again when what they read has changed
	@$(PYTEST) --record -m 'extended and not exhaustive' $(PYTEST_ARGS) $$($(BIN)/python tests/kernels/passed.py)

test-gpu: $(DEV_READY) ## The tests that need an NVIDIA GPU (and PyTorch built for it in the environment)
	@$(BIN)/python -m pytest -m gpu $(PYTEST_ARGS) tests

test-gpu-mps: $(DEV_READY) ## The same under a daemon of NVIDIA's Multi-Process Service that is the tests' own
	@$(BIN)/python tests/gpu/under_mps.py $(PYTEST_ARGS) tests

lint: $(DEV_READY) ## ruff (rules and format) and mypy (strict)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(DEV_READY) ## Let ruff format and mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(DEV_READY) ## Generate the stubs from proto/
	$(BIN)/python proto/generate.py

bench: $(DEV_READY) ## Measure against NumPy (and PyTorch, where installed); BENCH_ARGS="--suite gemm"
	$(BIN)/python bench/run.py $(BENCH_ARGS)

wheel: $(DEV_READY) ## Build the wheel into dist/
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean: ## Remove the environment, caches and build outputs
	rm -rf $(VENV) .tools build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
