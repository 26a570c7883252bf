# Everything runs in one environment, .venv, which each target brings up to date first.

SHELL := /bin/sh
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.complete
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps
SOURCES := src plugins jobs dags tests tools demo

DAYS ?= 3
KEEP ?=
ROWS ?=
WORKLOADS ?=
QUICK ?=
OUT ?=

export PYTHONPATH := tools

.PHONY: help env demo bench check test test-slow lint format docs site clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env: $(STAMP) ## create or update the environment in .venv

$(STAMP): requirements.lock requirements-dev.lock requirements-build.lock pyproject.toml src/cdc_replay/spark/java.py
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' \
	    || { echo "Python 3.11, 3.12 or 3.13 is needed; give it as PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null \
	    || { echo "Python's venv is incomplete: install the package python3-venv" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) --require-hashes -r requirements-build.lock
	$(PIP_INSTALL) --require-hashes --no-build-isolation -r requirements.lock -r requirements-dev.lock
	$(PIP_INSTALL) --no-build-isolation --editable .
	$(BIN)/python -m compileall -q src plugins
	@$(BIN)/python -m embedded.java_cache || echo "Spark will start more slowly: Java has written no cache" >&2
	@touch $@

demo: env ## run the whole pipeline on embedded servers: make demo [DAYS=3] [KEEP=1]
	@trap : INT; $(BIN)/python demo/run.py --days $(DAYS) $(if $(KEEP),--keep) || test $$? -eq 130

bench: env ## compare with native replication: make bench [WORKLOADS="churn copy_*"] [ROWS=1000000] [QUICK=1]
	set -f; PYTHONPATH=tools:tests:demo $(BIN)/python -m benchmarks.run \
	    $(if $(ROWS),--rows $(ROWS)) $(if $(QUICK),--quick) $(if $(OUT),--out $(OUT)) $(WORKLOADS)

check: lint ## before every commit: linters, types, and the unit tests, which need no server
	$(BIN)/python -m pytest tests/unit -m "not slow and not spark" --numprocesses 2

test: env ## run the tests
	$(BIN)/python -m pytest -m "not slow" --numprocesses 3 --dist loadfile --no-loadscope-reorder

test-slow: env ## run the tests that take long
	$(BIN)/python -m pytest -m slow

lint: env site ## check format, style, types, dependencies and the site's links
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	PYTHONPATH=src:plugins $(BIN)/lint-imports

format: env ## format the code
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

docs: env ## write the generated pages, and build the site
	$(BIN)/python tools/filters_page.py
	$(BIN)/python tools/licences_page.py
	$(BIN)/python tools/reference_pages.py
	$(BIN)/python tools/semantics_page.py
	$(MAKE) site

site: env ## build the documentation site in .site; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

clean: ## remove what the other targets made
	rm -rf $(VENV) .runtime .site bench_results .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis src/*.egg-info
