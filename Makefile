# Everything runs in .venv, made with the system's python3. `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What only the benchmarks against other tools need is installed by `make bench`.
EXTRAS := train,dev

MINUTES ?= 60
WORKERS ?= 3

.PHONY: help quickstart install check unit smoke test faults fuzz bench lock clean

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

unit: install ## tests that start no processes, in 90 s
	$(BIN)/python -m pytest tests/unit -m 'not processes and not faults' -n 2

smoke: install ## two ranks with each trainer, and a killed rank, in 2 minutes
	$(BIN)/python -m pytest tests/multiproc -m smoke

# Slurm and container tests mostly wait: they run beside the others, each kind in a worker of its own.
test: install ## all tests but the heavy ones
	bash scripts/test_packages.sh
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

faults: install ## all faults that a run must survive, with a table of them at the end
	bash scripts/test_packages.sh
	$(BIN)/python -m pytest -m 'faults or quick_fault' --timeout 1800

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
