# make demo          train the quickstart model
# make test          run the tests; make test-fast those without Ray
# make test-slow     what takes seconds without Ray: runs, compiled models, damaged files, process groups
# make test-sweeps   whole sweeps; make test-faults tests that kill
# make test-tools    the doctor, the notebook, security
# make test-models   HellaSwag, weights in and out, sharding, torchrun, profiles, benchmarks
# make test-chaos    kill a random process in each of 20 runs, and ten times in a scaling study (25 minutes, not in CI)
# make test-cluster  `ray up` on three hosts made of namespaces (root)
# make test-readme   every command of README and getting-started, in a fresh clone and environment
# make null-gpu      count what is launched on a GPU that is not there; downloads torch's CUDA build, 2 GB (not in CI)
# make wheel         what cluster files install on every node: dist/
# make check         all that CI checks, two at a time: format, lint, types, test-fast, test-slow, and
#   test-shared      all tests that share one Ray cluster
#   test-own         all tests that start clusters of their own: tools, cluster
#   test-readme-short  the commands of README and getting-started, shortened
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# With what the tests need besides.
TESTABLE := $(VENV)/.installed-dev
# Markers of tests that share one Ray cluster, and of tests too slow for `make test`.
SHARED := ray or sweeps or models or faults
SLOW := slow or sweeps or tools or models or faults or cluster

.PHONY: demo test test-fast test-slow test-sweeps test-tools test-models test-faults test-cluster test-shared test-own
.PHONY: null-gpu test-chaos test-readme test-readme-short wheel check checks format lint types clean

demo: $(INSTALLED)
	@$(BIN)/raytrain-gpt train
	@echo "to have the raytrain-gpt command: . $(VENV)/bin/activate"

test: test-fast
	$(BIN)/pytest -m "ray and not ($(SLOW))"

test-fast: $(TESTABLE)
	$(BIN)/pytest -n 2 --dist worksteal -m "not (ray or $(SLOW))"

test-slow: $(TESTABLE)
	$(BIN)/pytest -n 2 --dist worksteal -m "slow and not ($(SHARED))"

test-sweeps test-tools test-models test-faults test-cluster: $(TESTABLE)
	$(BIN)/pytest -rs -m $(@:test-%=%)

test-chaos: $(TESTABLE)
	$(BIN)/python -m tests.faults.chaos
	$(BIN)/python -m tests.faults.study_kills

# One session, so that one cluster, its data and its reference runs are made once.
test-shared: $(TESTABLE)
	$(BIN)/pytest -m "$(SHARED)"

test-own: $(TESTABLE)
	$(BIN)/pytest -rs -m "tools or cluster"

null-gpu:
	benchmarks/null_gpu/run.sh

test-readme: $(TESTABLE)
	$(BIN)/python -m tests.readme

test-readme-short: $(TESTABLE)
	$(BIN)/python -m tests.readme --short

wheel: $(INSTALLED)
	rm -rf build dist
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .
	cp constraints.txt dist/

# Two at a time, the longest first; each prints its output when it ends.
check: $(TESTABLE)
	@echo "two targets at a time; each prints its output when it ends"
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target checks

# Threads that wait must not spin: the other target uses the core.
checks: export OMP_WAIT_POLICY := PASSIVE
checks: format lint test-shared test-own test-fast test-slow test-readme-short types

format: $(TESTABLE)
	$(BIN)/ruff format --check .

lint: $(TESTABLE)
	$(BIN)/ruff check .

types: $(TESTABLE)
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info

$(INSTALLED): pyproject.toml constraints.txt
	@echo "installing into $(VENV): at most 7 GB with CUDA, 2.1 GB on PyTorch's CPU build (README, Install); takes minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -c constraints.txt -e .
	touch $@

$(TESTABLE): $(INSTALLED)
	$(BIN)/pip install -c constraints.txt -e '.[dev]'
	touch $@
