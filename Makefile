# make demo          train the quickstart model
# make test          run the tests; make test-fast those without Ray
# make test-sweeps   whole sweeps; make test-faults tests that kill
# make test-tools    the doctor, the notebook, security
# make test-models   HellaSwag, async evaluation, weights in and out, sharding, torchrun, profiles, benchmarks
# make test-serve    serving over HTTP, with a browser
# make test-chaos    kill a random process in each of 20 runs (a quarter of an hour, not in CI)
# make test-cluster  `ray up` on three hosts made of namespaces (root)
# make test-readme   every command of README and getting-started, in a fresh clone and environment
# make wheel         what cluster files install on every node: dist/
# make check         all that CI checks: format, lint, types, test-fast, then
#   test-shared      all tests that share one Ray cluster
#   test-own         all tests that start clusters of their own: tools, serve, cluster
#   and the commands of README and getting-started, shortened
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# What is too slow for `make test`.
SLOW := sweeps or tools or models or serve or faults or cluster

.PHONY: demo test test-fast test-sweeps test-tools test-models test-serve test-faults test-cluster test-shared test-own
.PHONY: test-chaos test-readme wheel check format lint types clean

demo: $(INSTALLED)
	@$(BIN)/raytrain-gpt train
	@echo "to have the raytrain-gpt command: . $(VENV)/bin/activate"

test: test-fast
	$(BIN)/pytest -m "ray and not ($(SLOW))"

test-fast: $(INSTALLED)
	$(BIN)/pytest -n 2 --dist worksteal -m "not (ray or $(SLOW))"

test-sweeps test-tools test-models test-serve test-faults test-cluster: $(INSTALLED)
	$(BIN)/pytest -rs -m $(@:test-%=%)

test-chaos: $(INSTALLED)
	$(BIN)/python -m tests.faults.chaos

# One session, so that one cluster, its data and its reference runs are made once.
test-shared: $(INSTALLED)
	$(BIN)/pytest -m "ray or sweeps or models or faults"

test-own: $(INSTALLED)
	$(BIN)/pytest -rs -m "tools or serve or cluster"

test-readme: $(INSTALLED)
	$(BIN)/python -m tests.readme

wheel: $(INSTALLED)
	rm -rf build dist
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .
	cp constraints.txt dist/

check: format lint types test-fast test-shared test-own
	$(BIN)/python -m tests.readme --short

format: $(INSTALLED)
	$(BIN)/ruff format --check .

lint: $(INSTALLED)
	$(BIN)/ruff check .

types: $(INSTALLED)
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info

$(INSTALLED): pyproject.toml constraints.txt
	@echo "installing into $(VENV): 7 GB with CUDA, 3 GB on PyTorch's CPU build (README, Install); takes minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -c constraints.txt -e '.[dev]'
	touch $@
