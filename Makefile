# Each target sets up what it needs: a .venv in this folder, with the versions of constraints.txt.
# PYTHON=python3.12   the Python to use (3.11 or newer)
# TORCH=auto          cpu, cuda, or auto: cuda where nvidia-smi lists a GPU, else cpu
# TORCH_INDEX=        an index, or a folder of wheels, to take torch from
# PART=               one of N parts of the tests of make nightly, for instance make nightly PART=3/14
# ARGS=               further arguments for the command, for instance make test ARGS="-k encode"

PYTHON ?= python3
TORCH ?= auto
TORCH_INDEX ?=
PART ?=
ARGS ?=
SCALE ?= quick
WORKERS ?= $(shell $(PYTHON) -c 'import os; print(min(8, os.cpu_count() or 1))')

BIN := .venv/bin
INSTALL = $(PYTHON) .ci/install.py --torch $(TORCH) --torch-index "$(TORCH_INDEX)"

.PHONY: help reproduce speed test nightly nightly-newest docs lint style types contract exhaustive mutation release-check check-pins install install-test clean
.DEFAULT_GOAL := help

help:                ## this list
	@grep -hE '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /	/' | expand -t 16

reproduce: install   ## run the experiments and write reports/index.html
	$(BIN)/ao-lab reproduce --scale $(SCALE) $(ARGS)

speed: install-test  ## compare speeds with ml_dtypes, XLA and torchao
	$(BIN)/ao-lab reproduce speed --scale $(SCALE) $(ARGS)

# Every worker, and every process of a test, would compile all modules again, and pytest rewrite all asserts.
test nightly: export PYTHONDONTWRITEBYTECODE =
test: install-test   ## all tests that need no GPU
	@$(BIN)/ao-lab ledger --check || true  # what only a GPU can test: said here, failed nowhere
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

nightly: install-test  ## every further record and shape of those tests (about twenty minutes on two cores)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m nightly $(if $(PART),--part $(PART)) $(ARGS)

nightly-newest:      ## the tests that other libraries may break, with the newest of them (an environment of its own)
	$(PYTHON) .ci/newest.py --torch $(TORCH) --torch-index "$(TORCH_INDEX)" -- -n $(WORKERS) --dist worksteal $(ARGS)

docs: install-test   ## build the documentation into build/docs: a broken link or example fails
	$(BIN)/sphinx-build --nitpicky --fail-on-warning --keep-going --fresh-env --quiet -d build/doctrees docs build/docs $(ARGS)
	@echo "documentation: build/docs/index.html"

lint: style types contract ## style, types and the import contract

style: install-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install-test
	$(BIN)/mypy

contract: install-test
	$(BIN)/lint-imports

exhaustive: install-test  ## all 2^32 float32 inputs against the reference
	$(BIN)/python -m tests.repo.exhaustive_float32 $(ARGS)

mutation: install-test    ## break one rule at a time and see the tests object
	$(BIN)/python -m tests.repo.mutation $(ARGS)

release-check:       ## build sdist and wheel, install the wheel in a fresh environment and use it (ARGS=--full: with torch)
	$(PYTHON) .ci/release.py check $(ARGS)

check-pins:          ## ask the package index whether every version of constraints.txt is there (needs a network, installs nothing)
	$(PYTHON) -m pip install --dry-run --quiet --no-deps --ignore-installed --requirement constraints.txt $(ARGS)

install:             ## the environment .venv alone (TORCH=cuda: with torch for NVIDIA GPUs)
	@$(INSTALL) run

install-test: ; @$(INSTALL) test

clean:               ## remove the environment and all caches (not reports/)
	rm -rf .venv .venv-newest build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis *.egg-info
	find ao_lab reference fast experiments tests .ci -name __pycache__ -type d -prune -exec rm -rf {} +
