# `make run` and `make test` install what they need into .venv/ on first use.
# Another interpreter: make test PYTHON=python3.12. One run: make run PARAMS=params/train_hybrid/seed1.yaml
PYTHON ?= python3
VENV := .venv/$(notdir $(PYTHON))
BIN := $(VENV)/bin
SMOKE_ORDER := preflight kernel_audit train_baseline train_hybrid export evaluate compare
PARAMS ?= $(SMOKE_ORDER:%=params/%/smoke.yaml)
TESTS ?= tests
# A file of tests stays in one process; most of their time is compiling, on one core each.
PYTEST := -m pytest --numprocesses auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

.PHONY: help run test unit schedules notebooks kaggle lint clean
.DEFAULT_GOAL := help

help: ## show this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

run: $(VENV)/.installed ## run the whole suite at smoke size, or one run: PARAMS=params/train_hybrid/seed1.yaml
	@$(BIN)/python -m atomic_lib.run $(PARAMS)

test: $(VENV)/.installed-dev ## run the tests: units, notebook pairs, each notebook's smoke run
	@$(BIN)/python $(PYTEST) $(TESTS) -m "not compiler"

unit: $(VENV)/.installed-dev ## run the tests that need no notebook
	@$(BIN)/python $(PYTEST) $(TESTS) -m "not notebook and not compiler"

schedules: $(VENV)/.installed-dev ## compile the TPU kernels for v5e and compare with schedule.lock.json (long)
	@$(BIN)/python -m pytest $(TESTS) -m compiler

notebooks: $(VENV)/.installed ## refresh the .ipynb pairs from their .py sources
	@$(BIN)/jupytext --quiet --to ipynb --update notebooks/[0-9]*.py

kaggle: $(VENV)/.installed ## write what `kaggle` uploads: make kaggle OWNER=<your Kaggle name> [JOBS=train_hybrid/seed1]
	@$(BIN)/python -m atomic_lib.kaggle "$(OWNER)" $(JOBS)

lint: $(VENV)/.installed-dev ## check style and types
	@$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy atomic_lib kernels/atomic_kernels

clean: ## remove environments and caches; outputs/ and data/ stay
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Python compiles what is imported when it is; all of it would take a minute and a half more.
PIP := -m pip install --quiet --disable-pip-version-check --no-compile

$(VENV)/.installed: requirements.txt
	@echo "Installing into $(VENV) (first use: a few minutes, about 3 GB)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python $(PIP) --upgrade "pip>=25.1"
	@$(BIN)/python $(PIP) -r requirements.txt
	@touch $@

$(VENV)/.installed-dev: pyproject.toml $(VENV)/.installed
	@$(BIN)/python $(PIP) --group dev
	@touch $@
