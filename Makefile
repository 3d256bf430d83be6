# make demo          train the quickstart model
# make test          run the tests; make test-fast those without Ray, make test-faults those that kill
# make check         all that CI checks
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed


.PHONY: demo test test-fast test-faults check format lint types clean

demo: $(INSTALLED)
	@$(BIN)/raytrain-gpt train
	@echo "to have the raytrain-gpt command: . $(VENV)/bin/activate"

test: $(INSTALLED)
	$(BIN)/pytest -m "not faults"

test-fast: $(INSTALLED)
	$(BIN)/pytest -m "not ray and not faults"

test-faults: $(INSTALLED)
	$(BIN)/pytest -m faults

check: format lint types test test-faults

format: $(INSTALLED)
	$(BIN)/ruff format --check .

lint: $(INSTALLED)
	$(BIN)/ruff check .

types: $(INSTALLED)
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@
