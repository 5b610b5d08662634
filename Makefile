# One command on a fresh clone: `make report` shows a plan, `make test` runs every check.
# PYTHON picks the interpreter (3.10 or newer), VENV the folder of the environment, TORCH another release of torch.

PYTHON ?= python3
VENV ?= .venv
TORCH ?=
MODEL ?= examples/gpt2/model.py
BUDGET ?= 75%

BIN := $(VENV)/bin
READY := $(VENV)/.ready

# The container's user has your number, so that what it writes is yours; root's is none for a user.
USER_ID := $(filter-out 0,$(shell id -u))
USER_ID := $(or $(USER_ID),1000)
PORT ?= 8888
GPUS ?= $(if $(shell command -v nvidia-smi),--gpus all)

.PHONY: report test lint bench dev-start clean

report: $(READY)  ## plan an example model on this machine
	$(BIN)/ckpt-plan report $(MODEL) --budget $(BUDGET) --device cpu --measure --verify

test: $(READY)  ## ruff, mypy (both in tests/test_quality.py) and every other test
	$(BIN)/python -m pytest

lint: $(READY)  ## ruff and mypy alone
	$(BIN)/python -m pytest tests/test_quality.py

bench: $(READY)  ## the figures of benchmarks/RESULTS.md
	$(BIN)/python -m benchmarks.budget

dev-start:  ## JupyterLab in a container with this folder in it, on http://localhost:PORT
	docker build --target dev --build-arg USER_ID=$(USER_ID) --tag ckpt-planner-dev .
	docker run --rm -it $(GPUS) -p 127.0.0.1:$(PORT):8888 -v "$(CURDIR)":/opt/ckpt-planner ckpt-planner-dev

$(READY): pyproject.toml scripts/install.sh scripts/constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	PYTHON=$(BIN)/python TORCH="$(TORCH)" EXTRAS=test EDITABLE=1 scripts/install.sh
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
