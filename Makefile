# make demo          train the quickstart model
# make test          run the tests; make test-fast those without Ray
# make test-sweeps   whole sweeps; make test-faults tests that kill
# make test-tools    the doctor, the notebook, security
# make test-models   HellaSwag, evaluation beside training, weights in and out, sharding, profiles, benchmarks
# make test-serve    serving over HTTP, with a browser
# make test-cluster  `ray up` on three hosts made of namespaces (root)
# make wheel         what cluster files install on every node: dist/
# make check         all that CI checks
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed


.PHONY: demo test test-fast test-sweeps test-tools test-models test-serve test-faults test-cluster wheel check format lint types clean

demo: $(INSTALLED)
	@$(BIN)/raytrain-gpt train
	@echo "to have the raytrain-gpt command: . $(VENV)/bin/activate"

test: $(INSTALLED)
	$(BIN)/pytest -m "not faults and not sweeps and not tools and not models and not serve and not cluster"

test-fast: $(INSTALLED)
	$(BIN)/pytest -m "not ray and not faults and not sweeps and not tools and not models and not serve and not cluster"

test-sweeps: $(INSTALLED)
	$(BIN)/pytest -m sweeps

test-tools: $(INSTALLED)
	$(BIN)/pytest -m tools

test-models: $(INSTALLED)
	$(BIN)/pytest -m models

test-serve: $(INSTALLED)
	$(BIN)/pytest -m serve -rs

test-faults: $(INSTALLED)
	$(BIN)/pytest -m faults

test-cluster: $(INSTALLED)
	$(BIN)/pytest -m cluster -rs

wheel: $(INSTALLED)
	rm -rf build dist
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .
	cp constraints.txt dist/

check: format lint types test test-sweeps test-tools test-models test-serve test-faults test-cluster

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
