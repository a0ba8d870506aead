# Everything from a fresh clone: `make train`. RUN names another run file, PYTHON another interpreter.
RUN ?= experiments/sample.yaml
PYTHON ?= python3
# The versions that `make setup` installs: those that were tested on a GPU where nvidia-smi lists one.
GPU = $(shell nvidia-smi -L 2>/dev/null | grep -m 1 ^GPU)
CONSTRAINTS ?= $(if $(GPU),constraints-gpu.txt,constraints.txt)

SAMPLE_RUN := experiments/sample.yaml
BIN := .venv/bin
READY := .venv/.ready
LOOKONCE := $(BIN)/lookonce
FOUND = $(if $(GPU),found a GPU,found no GPU)
# Set if CONSTRAINTS was named and .venv has another set.
OTHER_SET := $(if $(filter command environment,$(origin CONSTRAINTS)),$(filter-out $(shell cat $(READY) 2>/dev/null),$(CONSTRAINTS)))
# Each process runs one test file at a time, on one thread, so that the processes do not compete for cores. Bytecode is kept
# also where the environment forbids it: to compile sources and to rewrite assertions takes two seconds in each process.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/pytest --numprocesses auto --maxprocesses 8 --dist loadfile
# In this order, so that no process is left with a file of a minute when the others have ended.
LONGEST_FIRST := --no-loadscope-reorder tests/integration tests/unit

.DEFAULT_GOAL := help
.PHONY: help again setup sample cache train eval test unit coverage fuzz qlora-test slurm-test package package-test test-lowest dist release check format docs docs-pages clean

help:  ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  RUN=path.yaml names another run file (now: $(RUN))"

setup: $(READY)  ## Make .venv with the tested versions of everything (CONSTRAINTS=file names another set)

$(READY): constraints.txt constraints-gpu.txt pyproject.toml $(if $(OTHER_SET),again)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "lookonce needs Python 3.11 or later; name one with PYTHON=")'
	@echo "$(FOUND): installing the versions in $(CONSTRAINTS)"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) --editable '.[dev,docs,metrics,track]'
	@echo $(CONSTRAINTS) > $@

sample: $(READY)  ## Write the sample set and its tiny model to data/sample
	$(LOOKONCE) sample data/sample

cache: $(READY) $(if $(filter $(SAMPLE_RUN),$(RUN)),sample)  ## Phase 1: encode every image of RUN once
	$(LOOKONCE) cache build $(RUN)

train: cache  ## Phase 2: train RUN from the cache, evaluate, summarise (the sample: compare with stock training)
	$(LOOKONCE) train $(RUN) --resume
	$(if $(filter $(SAMPLE_RUN),$(RUN)),$(LOOKONCE) bench step $(RUN) --steps 20)

eval: $(READY)  ## Evaluate what RUN has trained on its test split
	$(LOOKONCE) eval $(RUN) --split test

test: $(READY)  ## Run all tests except those of slurm/, in parallel
	$(PYTEST) $(LONGEST_FIRST)

unit: $(READY)  ## Run only the unit tests
	$(PYTEST) tests/unit

coverage: $(READY)  ## Run all tests and list the modules with uncovered lines (subprocesses do not count)
	$(PYTEST) --cov --cov-report=term $(LONGEST_FIRST)

fuzz: $(READY)  ## Run every parser on 20,000 damaged files (FUZZ_CASES=number sets how many)
	LOOKONCE_FUZZ_CASES=$(or $(FUZZ_CASES),20000) $(PYTEST) -rP tests/integration/security

# Not part of `test`: where bitsandbytes is installed PEFT imports it, which takes each process a second or two.
qlora-test: $(READY)  ## Install bitsandbytes and test training on quantised weights
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) --editable '.[qlora]'
	$(PYTEST) tests/integration/train/frozen

slurm-test: $(READY)  ## Test slurm/ under a real Slurm, which is installed first if possible (Debian, root)
	tests/slurm/install.sh
	$(BIN)/pytest tests/slurm

package: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) --editable '.[package]'

# Not part of `test`: these need a package index and minutes.
package-test: package  ## Build wheel and sdist, install the wheel where no clone is, and train there
	CONSTRAINTS=$(CONSTRAINTS) $(BIN)/pytest tests/package/test_wheel.py

test-lowest: package  ## Resolve all extras for each Python, lowest and newest; run the unit tests with the lowest
	$(BIN)/pytest tests/package/test_bounds.py
	OMP_NUM_THREADS=1 $(BIN)/python tests/package/lowest.py build/lowest

dist: package  ## Build the sdist and the wheel in dist/
	rm -rf dist
	$(BIN)/python -m build
	rm -rf build/lib build/bdist.*
	$(BIN)/python -m twine check --strict dist/*

release: package  ## Check everything, build, and print the commands that upload; uploads nothing
	$(BIN)/python tests/package/release.py
	$(MAKE) check test docs slurm-test qlora-test package-test test-lowest dist
	$(BIN)/python tests/package/release.py build/notes.md

check: $(READY)  ## Lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)  ## Put the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)  ## Build the site in docs/_build/html; a warning or a broken link is an error
	$(BIN)/sphinx-build --quiet --fresh-env --fail-on-warning --keep-going --conf-dir docs . docs/_build/html
	@echo "open docs/_build/html/index.html"

docs-pages: $(READY)  ## Write docs/run-file.md, docs/guarantees.md and docs/pack.svg from the code again
	$(BIN)/python docs/generate_run_file.py
	$(BIN)/python docs/generate_guarantees.py
	$(BIN)/python docs/draw_pack.py

clean:  ## Remove the environment and what tools left; keeps data, caches and runs
	rm -rf .venv build dist docs/_build src/*.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage
	find cache datasets train eval src tests -name __pycache__ -type d -prune -exec rm -rf {} +
