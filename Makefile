# `make demo` and `make test` work in a fresh clone; both set up the environment first.

PYTHON_IN_VENV := .venv/bin/python
# half of the configuration's steps, which bring an accuracy of 0.99 in place of 1.00
DEMO := $(PYTHON_IN_VENV) examples/start_onpolicy_distill_pipeline.py --config_path demo --config_name onpolicy_distill \
	max_steps=40 eval_steps=10

# Tests run in groups that share started processes (tests/groups.py). A group waits for processes a third of its time:
# on two cores three groups at a time keep both busy.
PROCESSES ?= 3
PYTEST := -m pytest -n $(PROCESSES) -v --durations=40
LOGS := build/tests
SHOWN = 2>&1 | $(PYTHON_IN_VENV) scripts/log_filter.py $(LOGS)/$(@:tests-%=%).log
SHELL := bash
.SHELLFLAGS := -o pipefail -c

tests-%: export COLUMNS := 120
tests-%: export PYTHONUNBUFFERED := 1

# set-up compiles few modules; the first import of a module writes its bytecode for all later processes
unexport PYTHONDONTWRITEBYTECODE

CLAIM ?=

.PHONY: help setup demo claims test test-all test-fast tests-push tests-all lint style format docs site doctor clean

help:
	@echo "make demo       set up, then distil the example teacher into the example student on the CPU"
	@echo "make test       set up, then lint and run the tests of every push: all but the nightly ones"
	@echo "make test-all   set up, then lint and run all tests, and measure which lines they execute"
	@echo "make test-fast  set up, then run the tests that start no engines and no whole runs"
	@echo "make claims     set up, then measure the claims of docs/evidence.md; CLAIM=NAME: one of them"
	@echo "make lint       set up, then check style (ruff) and types (mypy)"
	@echo "make format     set up, then let ruff fix and format the code"
	@echo "make docs       set up, then write docs/configuration.md from the declarations of the keys"
	@echo "make site       build the pages as a site with search in build/site"
	@echo "make setup      make .venv and install what requirements/*.lock pin (immediate if it is up to date)"
	@echo "make doctor     set up, then report installed packages, devices and problems"
	@echo "make clean      remove .venv and caches; run directories (output/) stay"

setup:
	@bash scripts/setup.sh

demo: setup
	@$(DEMO)

claims: setup
	@$(PYTHON_IN_VENV) benchmarks/claims.py $(CLAIM)

# repeat failures at the end of the log
SAY_AGAIN = { for log in $(LOGS)/*.log; do echo $$log; \
	grep -E '^(E  |FAILED|ERROR|[=]+ .*(passed|failed|error))' $$log | cut -c1-400 | tail -n 40; done; exit 1; }

# the linter runs in parallel with the tests at a lower priority
test: setup
	@rm -rf $(LOGS)
	@$(MAKE) --no-print-directory --keep-going --jobs=2 tests-push style || $(SAY_AGAIN)

test-all: setup
	@rm -rf $(LOGS) build/coverage
	@$(MAKE) --no-print-directory --keep-going --jobs=2 tests-all style || $(SAY_AGAIN)

tests-push:
	@$(PYTHON_IN_VENV) $(PYTEST) -m "not nightly" $(SHOWN)

# killed processes write no coverage data, so the share is a lower bound
tests-all:
	@$(PYTHON_IN_VENV) -m coverage run $(PYTEST) $(SHOWN); code=$$?; \
		$(PYTHON_IN_VENV) -m coverage combine -q && \
		$(PYTHON_IN_VENV) -m coverage report > build/coverage/report.txt && \
		tail -n 1 build/coverage/report.txt; exit $$code

test-fast: setup
	@$(PYTHON_IN_VENV) -m pytest -n 2 -q -m "not slow"

lint: setup style

style:
	@nice $(PYTHON_IN_VENV) -m ruff check .
	@nice $(PYTHON_IN_VENV) -m ruff format --check .
	@nice $(PYTHON_IN_VENV) -m mypy

format: setup
	@$(PYTHON_IN_VENV) -m ruff check --fix .
	@$(PYTHON_IN_VENV) -m ruff format .

docs: setup
	@$(PYTHON_IN_VENV) scripts/configuration_page.py

# tools with separate environments: build/site_env, build/notebook_env
build/%_env/installed: requirements/%.txt
	@rm -rf $(@D)
	@$(or $(PYTHON),python3) -m venv $(@D)
	@$(@D)/bin/python -m pip install -qq --disable-pip-version-check -r $<
	@touch $@

site: build/site_env/installed
	@build/site_env/bin/python scripts/site_pages.py build
	@build/site_env/bin/zensical build --config-file build/zensical.toml --strict --clean
	@echo "build/site/index.html"

doctor: setup
	@.venv/bin/roll-opd doctor

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache build roll_opd.egg-info
	find roll_opd tests examples -name __pycache__ -type d -exec rm -rf {} +
