# Everything runs in .venv, made with the system's python3. `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

MINUTES ?= 60
SUITE ?= trixie
WORKERS ?= 3

# Without cached bytecode each of the thousands of test processes compiles hpcdist anew, and each worker all test files.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help quickstart install check unit smoke test slow faults test-slurm fuzz bench docs recording screenshots lock pin clean

help: ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

quickstart: install ## set everything up and train real digits on two ranks
	$(BIN)/hpcdist run ddp_digits

install: $(VENV)/.installed ## make .venv with hpcdist in it

$(VENV)/.installed: pyproject.toml scripts/install.sh $(wildcard docker/requirements*.txt)
	PYTHON=$(PYTHON) bash scripts/install.sh $(VENV)
	touch $@

check: install ## formatting, lint and types, also of Dockerfiles and shell scripts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/hadolint docker/Dockerfile docker/mlflow.Dockerfile
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --builtin-schema vendor.dependabot .github/dependabot.yml
	if [ -x $(BIN)/actionlint ]; then $(BIN)/actionlint; fi
	$(BIN)/shellcheck .ci/run benchmarks/*.sh docker/*.sh hpcdist/containers/*.sh hpcdist/containers/apptainer_mount/* tests/support/*.sh scripts/*.sh scripts/runtimes/*.sh

unit: install ## tests that start no processes, in 90 s
	$(BIN)/python -m pytest tests/unit -m 'not processes and not faults and not slow' -n 2

smoke: install ## two ranks with each trainer, and a killed rank, in 2 minutes
	$(BIN)/python -m pytest tests/multiproc -m smoke

# Slurm and container tests mostly wait: they run beside the others, each kind in a worker of its own, on 2 cores.
test: install ## every capability at least once
	bash scripts/test_packages.sh
	$(BIN)/python -m pytest -n $(WORKERS)

slow: install ## further variants of what `make test` shows; CI runs both
	bash scripts/test_packages.sh
	bash scripts/retry.sh $(BIN)/python -m pip install --quiet --no-deps --require-hashes --requirement docker/requirements-slow.txt
	$(BIN)/python -m pytest -m 'slow or lost_night' -n $(WORKERS)

faults: install ## all faults that a run must survive, with a table of them at the end
	bash scripts/test_packages.sh docker
	$(BIN)/python -m pytest -m 'faults or quick_fault' -n $(WORKERS) --timeout 1800

test-slurm: install ## the Slurm tests with the Slurm of another release: SUITE=trixie or sid; needs root
	bash scripts/slurm_suite.sh $(SUITE)

fuzz: install ## random input of all kinds for MINUTES (60), with new seeds each time
	$(BIN)/python scripts/fuzz.py $(MINUTES)

bench: install ## benchmarks against bare loops and other tools; results in benchmarks/RESULTS.md
	bash scripts/retry.sh $(BIN)/python -m pip install --quiet --editable '.[bench]'
	$(BIN)/python benchmarks/run_all.py

docs: install ## build the documentation into site/; a broken link or reference fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

recording: install ## record the README's terminal session on a dev cluster; needs root and the Slurm packages
	$(BIN)/python scripts/record_terminal.py docs/images/recording.svg

screenshots: install ## take the pictures of MLflow and of a report; needs Chromium
	HPCDIST_DOCS_IMAGES=docs/images HPCDIST_REQUIRE_BROWSER=1 $(BIN)/python -m pytest tests/browser/test_pictures.py -m ''

lock: install ## pin the packages of images and checkout anew, with hashes; UPGRADE=--upgrade takes the newest
	UV=$(BIN)/uv bash docker/lock.sh $(UPGRADE)

pin: ## pin the base images to the digests of their tags; needs docker's registry, and skopeo or docker
	bash scripts/pin_images.sh

clean: ## remove what was made here, runs excepted
	rm -rf $(VENV) build dist site .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	rm -rf --one-file-system /var/tmp/hpcdist-tests
