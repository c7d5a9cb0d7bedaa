# The two commands of the README: make demo, make test. Each makes .venv and installs what it needs.
# Another interpreter: make PYTHON=python3.13 test
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-vllm lint bench clean

demo: $(VENV)/.evals
	$(BIN)/decodegate demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest

# Tests with real vLLM servers on the CPU; make test runs them too where DECODEGATE_VLLM_CPU names a venv (.ci/run).
test-vllm: $(VENV)/.dev
	@test -x "$$DECODEGATE_VLLM_CPU/bin/vllm" || { echo "set DECODEGATE_VLLM_CPU to a venv with vllm-cpu" >&2; exit 1; }
	$(BIN)/python -m pytest -m server

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Figures, not tests: what the client costs and how true its stamps are. See tests/benchmarks.
bench: $(VENV)/.dev
	$(BIN)/python -m tests.benchmarks

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' \
	  || { echo "decodegate needs Python 3.11, 3.12 or 3.13; $(PYTHON) is $$($(PYTHON) --version 2>&1): make PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.evals: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[evals]'
	@touch $@

$(VENV)/.dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.evals

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
