# `make demo` and `make test` are all that a fresh clone needs; both set the environment up first.

PYTHON_IN_VENV := .venv/bin/python
DEMO := $(PYTHON_IN_VENV) examples/start_onpolicy_distill_pipeline.py --config_path demo --config_name onpolicy_distill

# sessions of pytest, the longest first: three share the cores, since each of them waits a good deal
SESSIONS := test-rooms test-launches test-megatron test-staged test-engines test-config
STAGED := $(wildcard tests/pipelines/test_staged_*.py)
PYTEST := $(PYTHON_IN_VENV) -u -m pytest -v --durations=30
LOGS := build/tests
SHOWN = 2>&1 | $(PYTHON_IN_VENV) scripts/shown.py $(LOGS)/$(@:test-%=%).log
SHELL := bash
.SHELLFLAGS := -o pipefail -c

# sessions run side by side: threads of one that wait, spinning, for those of another cost five times the work
test-% fast-%: export OMP_NUM_THREADS := 1
test-%: export COLUMNS := 120

# set-up compiles little: what is imported first is to be compiled for all the processes after it
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test $(SESSIONS) test-fast fast-config fast-rooms lint style format docs doctor clean

help:
	@echo "make demo       set up, then distil the example teacher into the example student on the CPU"
	@echo "make test       set up, then lint and run all tests"
	@echo "make test-fast  set up, then run the tests that start no engines and no whole runs"
	@echo "make lint       set up, then check style (ruff) and types (mypy)"
	@echo "make format     set up, then let ruff fix and format the code"
	@echo "make docs       set up, then write docs/configuration.md from the declarations of the keys"
	@echo "make setup      make .venv and install what requirements/*.lock pin (at once when it is up to date)"
	@echo "make doctor     set up, then say what is installed, what will be used and what is broken"
	@echo "make clean      remove .venv and caches; run directories (output/) stay"

setup:
	@bash scripts/setup.sh

demo: setup
	@$(DEMO)

# what failed is said again at the end, where somebody looks
test: setup
	@rm -rf $(LOGS)
	@$(MAKE) --no-print-directory --keep-going --jobs=3 $(SESSIONS) style \
		|| { for log in $(LOGS)/*.log; do echo $$log; \
			grep -E '^(E  |FAILED|ERROR|[=]+ .*(passed|failed|error))' $$log | cut -c1-400 | tail -n 40; done; exit 1; }

test-rooms:
	@$(PYTEST) --ignore=tests/pipelines --ignore=tests/megatron_engine --ignore=tests/inference --ignore=tests/config $(SHOWN)

test-launches:
	@$(PYTEST) tests/pipelines $(STAGED:%=--ignore=%) $(SHOWN)

test-megatron:
	@$(PYTEST) tests/megatron_engine $(SHOWN)

test-staged:
	@$(PYTEST) $(STAGED) $(SHOWN)

test-engines:
	@$(PYTEST) tests/inference $(SHOWN)

test-config:
	@$(PYTEST) tests/config $(SHOWN)

# half of the time goes to configurations, which Hydra composes anew for every test
test-fast: setup
	@$(MAKE) --no-print-directory --keep-going --jobs=2 --output-sync=target fast-config fast-rooms

fast-config:
	@$(PYTHON_IN_VENV) -m pytest -q -m "not slow" tests/config

fast-rooms:
	@$(PYTHON_IN_VENV) -m pytest -q -m "not slow" --ignore=tests/config

lint: setup style

style:
	@$(PYTHON_IN_VENV) -m ruff check .
	@$(PYTHON_IN_VENV) -m ruff format --check .
	@$(PYTHON_IN_VENV) -m mypy

format: setup
	@$(PYTHON_IN_VENV) -m ruff check --fix .
	@$(PYTHON_IN_VENV) -m ruff format .

docs: setup
	@$(PYTHON_IN_VENV) scripts/configuration_page.py

doctor: setup
	@.venv/bin/roll-opd doctor

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache build roll_opd.egg-info
	find roll_opd tests examples -name __pycache__ -type d -exec rm -rf {} +
