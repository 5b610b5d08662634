# One command on a fresh clone: `make report` shows a plan, `make test` runs every check.
# PYTHON picks the interpreter (3.10 or newer), VENV the folder of the environment.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
MODEL ?= examples/gpt2/model.py
BUDGET ?= 75%

BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: report test lint bench clean

report: $(READY)  ## plan an example model on this machine
	$(BIN)/ckpt-plan report $(MODEL) --budget $(BUDGET) --device cpu --measure --verify

test: $(READY)  ## ruff, mypy (both in tests/test_quality.py) and every other test
	$(BIN)/python -m pytest

lint: $(READY)  ## ruff and mypy alone
	$(BIN)/python -m pytest tests/test_quality.py

bench: $(READY)  ## the figures of benchmarks/RESULTS.md
	$(BIN)/python -m benchmarks.budget

# Torch first and by itself, so that its version is the one that is tested and not the newest that fits.
$(READY): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet -e '.[test]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
