# One command per chore; `make` alone lists them. Each installs what it needs into .venv first.
# Another interpreter: make test PYTHON=python3.12. More arguments: make test ARGS="-k plan".

PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
WHEEL := build/wheel
FOREIGN := build/foreign
BENCHMARKS := $(sort $(wildcard benchmarks/*/main.py))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all sweep lint format docs bench faults scenarios spot fuzz foreign changelog wheel-check clean

help: ## List these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(INSTALLED) ## Train a small model from scratch on two local workers
	$(BIN)/python examples/train_from_scratch/train.py $(ARGS)

PYTEST = $(BIN)/python -m pytest --numprocesses auto --dist loadfile --no-loadscope-reorder

# Tests start many processes. Each of them compiles everything where nobody may keep what is compiled.
test test-all: export PYTHONDONTWRITEBYTECODE =
test: $(INSTALLED) ## Run the first tier of the tests
	$(PYTEST) -m 'not exhaustive' $(ARGS)

test-all: $(INSTALLED) ## Run both tiers of the tests
	$(PYTEST) -m 'not sweep' $(ARGS)

sweep: $(INSTALLED) ## Run the rest of large tables of tests: each cell, each family
	$(PYTEST) -m sweep $(ARGS)

lint: $(INSTALLED) ## Check style, format, imports, types and docstrings
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/lint-imports --config tests/core_contract.toml
	$(BIN)/mypy
	$(BIN)/python -m tests.prose

format: $(INSTALLED) ## Format the code and repair what ruff can repair
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(INSTALLED) ## Build the site, and fail at a warning
	$(BIN)/python -m pip install --no-input -q -c constraints.txt --group docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build $(ARGS)

bench: $(INSTALLED) ## Run every benchmark
	@set -e; for script in $(BENCHMARKS); do echo "== $$script"; $(BIN)/python "$$script" $(ARGS); done

faults: $(INSTALLED) ## Kill, freeze and cut off workers at every place of a run
	$(BIN)/python -m tests.faults.main $(ARGS)

scenarios: $(INSTALLED) ## Train random scenarios over workers until Ctrl-C, each against plain Lightning
	$(BIN)/python -m tests.scenarios.main $(ARGS)

spot: $(INSTALLED) ## Train for ten minutes on workers that are killed and cut off now and then
	$(BIN)/python -m tests.faults.spot $(ARGS)

fuzz: $(INSTALLED) ## Tell the decoder, a worker and a door what is almost right
	$(BIN)/python -m tests.fuzz.main $(ARGS)

foreign: $(FOREIGN)/.installed ## Train other people's projects, on one device and over workers
	$(FOREIGN)/bin/python examples/foreign_projects/main.py $(ARGS)

# Their packages lie in front of those in .venv, which has torch and Lightning: some want older versions of others.
$(FOREIGN)/.installed: $(INSTALLED)
	rm -rf $(FOREIGN)
	$(BIN)/python -m venv --without-pip $(FOREIGN)
	$(BIN)/python examples/foreign_projects/in_front.py $(FOREIGN)
	grep -E '^(lightning|pytorch-lightning|torch|torchmetrics|transformers)==' constraints.txt > $(FOREIGN)/constraints.txt
	$(FOREIGN)/bin/python -m pip install --no-input -q -c $(FOREIGN)/constraints.txt --group foreign
# LitGPT wants versions of other packages that transformers does not take, and needs none of those versions here.
	$(FOREIGN)/bin/python -m pip install --no-input -q --no-deps 'litgpt>=0.5.13,<0.6'
	@touch $@

changelog: $(INSTALLED) ## Move the lines of changes/ into the changelog, for the present version
	$(BIN)/python -m towncrier build --yes $(ARGS)

wheel-check: $(INSTALLED) ## Build the wheel, and try it in an environment of its own
	rm -rf $(WHEEL)
	$(BIN)/python -m build --outdir $(WHEEL) .
	$(PYTHON) -m venv $(WHEEL)/venv
	$(WHEEL)/venv/bin/python -m pip install --no-input -q -c constraints.txt $(WHEEL)/*.whl
	$(WHEEL)/venv/bin/python tests/wheel_check.py $(WHEEL)

clean: ## Remove .venv, caches and build outputs
	rm -rf $(VENV) build dist .coverage .coverage.* htmlcov .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is touched last, so an install that was interrupted is taken up again by the next command.
$(INSTALLED): pyproject.toml constraints.txt
	@rm -f $@
	@command -v $(PYTHON) >/dev/null || { echo "lightning-hetero needs Python 3.10 or newer; '$(PYTHON)' was not found." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit("lightning-hetero needs Python 3.10 or newer; $(PYTHON) is %d.%d. Name another with PYTHON=..." % sys.version_info[:2] if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --no-input -q -c constraints.txt --upgrade pip
	$(BIN)/python -m pip install --no-input -c constraints.txt -e '.[examples]' --group dev
	@touch $@
