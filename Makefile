# `make demo` and `make test` set everything up themselves; all they need is Python 3.11 or newer with venv.
#
# Overridable: PYTHON=python3.12   VENV=.venv   PIP_ARGS="--index-url https://…"   PYTEST_ARGS="-k cli"

.DEFAULT_GOAL := help

VENV ?= .venv
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := $(VENV)/bin
STAMP := $(VENV)/.omniloom-installed

# On Linux, PyPI's torch brings CUDA; the CPU build is ten times smaller. The index is used where it can be reached.
CPU_INDEX := https://download.pytorch.org/whl/cpu
PROBE := import sys, urllib.request; sys.platform == "linux" and urllib.request.urlopen(sys.argv[1], timeout=5) and print("--extra-index-url", sys.argv[1])
PIP_ARGS ?= $(if $(PYTHON),$(shell $(PYTHON) -c '$(PROBE)' $(CPU_INDEX)/ 2>/dev/null))

PROMPT ?= a fox on blue
OUT ?= demo.png

.PHONY: help setup demo test test-all lint format clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) ## the virtual environment with omniloom in it

$(STAMP): pyproject.toml constraints-cpu.txt
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or newer found; install one or say PYTHON=/path/to/python3" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo \
		"make: $(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --progress-bar off $(PIP_ARGS) \
		-c constraints-cpu.txt -e ".[dev]"
	@touch $@

demo: setup ## paint "a fox on blue" with the model that ships with the project (PROMPT=… OUT=…)
	$(BIN)/omniloom generate --prompt "$(PROMPT)" -o "$(OUT)"

test: setup ## the tests that take seconds
	$(BIN)/python -m pytest -m "not slow" $(PYTEST_ARGS)

test-all: setup ## every test
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: setup ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup ## let ruff format and sort
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the virtual environment, caches and build output
	rm -rf $(VENV) build dist demo.png .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
