# Every target sets itself up: only python3 (3.11 or newer) and make are needed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test unit e2e lint bench gaps alarms ui clean constraints setup
.DEFAULT_GOAL := test

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,lint]'
	touch $(READY)

setup: $(READY)

demo: $(READY) ## a real training run hangs, is explained, restarted and finishes. KEEP=1 leaves the UI up
	$(BIN)/python -m deployments.demo $(if $(KEEP),--keep)

test: $(READY) ## unit, contract, integration and one end-to-end test
	$(BIN)/python -m pytest tests/unit tests/contract tests/integration tests/e2e/test_demo.py

unit: $(READY)
	$(BIN)/python -m pytest tests/unit tests/contract

e2e: $(READY) ## all end-to-end tests: the demo, and killing the watch in every way (25 minutes)
	$(BIN)/python -m pytest tests/e2e

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

bench: $(READY) ## what a poll costs: beside a flow run for each, and beside Ray's detector (10 minutes)
	$(BIN)/python -m tests.bench.poll_cost
	$(BIN)/python -m tests.bench.detect_cost

gaps: $(READY) ## the situations in which Ray's detector is wrong, with both results
	$(BIN)/python -m tests.bench.gap_table

alarms: $(READY) ## false alarms and misses over many simulated hours
	$(BIN)/python -m tests.bench.false_alarms

ui: $(READY) ## the Prefect server of this machine's rankwatch, with its UI
	$(BIN)/rankwatch up

constraints: $(READY) ## writes the versions that are installed now
	{ head -1 constraints.txt; $(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu//'; } > constraints.new
	mv constraints.new constraints.txt

clean:
	rm -rf $(VENV) .demo .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
