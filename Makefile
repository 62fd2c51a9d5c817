# Everything from nothing: needs Python 3.11 to 3.13 and a package index. A second call of a target starts at once.
#   make demo      the default model and task under five methods, as a table and a page (QUICK=1: a first look)
#   make test      what every change has to pass; `make test-all` adds the full product of methods and models
#   make test-ci   Slurm, W&B sweeps, kills and restarts: what needs programs of its own (see .ci/run)
#   make lint, make types, make imports      ruff, mypy, import contracts

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
EXTRAS := dev,report,slurm
WORKERS := 2
PYTEST_ARGS :=

# Tests run in parallel processes, so each takes one thread.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

define FIND_PYTHON
for name in $(PYTHON) python3.11 python3.12 python3.13 python3 python; do \
  if "$$name" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; \
  then found=$$name; break; fi; \
done; \
if [ -z "$${found:-}" ]; then \
  echo "no Python 3.11, 3.12 or 3.13 with the module venv was found: install one, or say make PYTHON=/path/to/python" >&2; \
  exit 1; \
fi
endef

.PHONY: help install model demo test test-all test-ci lint format types imports check clean

help:
	@sed -n 's/^# \{0,2\}//p' Makefile | sed -n 1,5p

$(BIN)/python:
	@$(FIND_PYTHON); echo "creating $(VENV) with $$($$found --version)"; $$found -m venv --clear $(VENV)

$(STAMPS)/installed: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/model: $(STAMPS)/installed
	$(BIN)/python -m kvexp.embedded
	@touch $@

install: $(STAMPS)/installed

model: $(STAMPS)/model

demo: $(STAMPS)/model
	$(BIN)/python scripts/demo.py $(if $(filter-out 0,$(QUICK)),quick)

test: $(STAMPS)/model
	$(ONE_THREAD) $(BIN)/python -m pytest -n $(WORKERS) -m 'not (slow or cluster or torture or browser)' $(PYTEST_ARGS)

test-all: $(STAMPS)/model
	$(ONE_THREAD) $(BIN)/python -m pytest -n $(WORKERS) -m 'not (cluster or torture or browser)' $(PYTEST_ARGS)

# What starts clusters, kills runs and opens browsers: one at a time, and skipped where its programs are absent.
test-ci: $(STAMPS)/model
	$(ONE_THREAD) $(BIN)/python -m pytest -m 'cluster or torture or browser' $(PYTEST_ARGS)

lint: $(STAMPS)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMPS)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMPS)/installed
	$(BIN)/mypy

imports: $(STAMPS)/installed
	$(BIN)/lint-imports

check: test lint types imports

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
