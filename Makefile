# Everything runs in .venv, made with the system's python3. `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What only the benchmarks against other tools need is installed by `make bench`.
EXTRAS := train,dev

MINUTES ?= 60

.PHONY: help quickstart install check test faults fuzz bench lock clean

help: ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

quickstart: install ## set everything up and train real digits on two ranks
	$(BIN)/hpcdist run ddp_digits

install: $(VENV)/.installed ## make .venv with hpcdist in it

$(VENV)/.installed: pyproject.toml scripts/install.sh
	PYTHON=$(PYTHON) bash scripts/install.sh $(VENV) $(EXTRAS)
	touch $@

check: install ## formatting, lint and types, also of Dockerfiles and shell scripts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/hadolint docker/Dockerfile docker/mlflow.Dockerfile
	$(BIN)/shellcheck .ci/run benchmarks/*.sh docker/*.sh hpcdist/containers/*.sh scripts/*.sh

test: install ## all tests but the heavy ones
	bash scripts/test_packages.sh
	$(BIN)/python -m pytest

faults: install ## all faults that a run must survive, with a table of them at the end
	bash scripts/test_packages.sh
	$(BIN)/python -m pytest -m 'faults or smoke' --timeout 1800

fuzz: install ## random input of all kinds for MINUTES (60), with new seeds each time
	$(BIN)/python scripts/fuzz.py $(MINUTES)

bench: install ## benchmarks against bare loops and other tools; results in benchmarks/RESULTS.md
	$(BIN)/python -m pip install --quiet --editable '.[bench]'
	$(BIN)/python benchmarks/run_all.py

lock: install ## pin the images' packages anew, with hashes; UPGRADE=--upgrade takes the newest
	UV=$(BIN)/uv bash docker/lock.sh $(UPGRADE)

clean: ## remove what was made here, runs excepted
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -rf --one-file-system /var/tmp/hpcdist-tests
