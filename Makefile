# make demo          train the quickstart model
# make test-fast     tests in one process, below a second each
# make test          test-fast, and the core promises on one Ray cluster
# make check         before a change: format, lint, types and the tests that guard every promise once
#   test-slow        seconds of a core without Ray: runs, compiled models, damaged files, process groups
#   test-ray         all on one Ray cluster: workers, sweeps, kills
#   test-readme-short  the commands of README and getting-started, shortened
# make check-all     what CI runs: check, and all tests marked `long`
#   test-ray-all     test-ray, further faults, and whole studies
#   test-long        clusters of their own, `ray up` on hosts made of namespaces (root), the notebook, larger models
# make test-chaos    kill a random process in each of 20 runs (20 minutes, not in CI)
# make test-readme   every command of README and getting-started, in a fresh clone and environment
# make null-gpu      count what is launched on a GPU that is not there; downloads torch's CUDA build, 2 GB (not in CI)
# make wheel         what cluster files install on every node: dist/
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# With what the tests need besides.
TESTABLE := $(VENV)/.installed-dev
# Bytecode is kept wherever make runs. Without it, every process compiles the package, every session the tests.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-fast test-slow test-ray test-ray-all test-long test-chaos test-readme test-readme-short
.PHONY: null-gpu wheel check check-all checks checks-all format lint types clean

demo: $(INSTALLED)
	@$(BIN)/raytrain-gpt train
	@echo "to have the raytrain-gpt command: . $(VENV)/bin/activate"

test: test-fast
	$(BIN)/pytest -m smoke

test-fast: $(TESTABLE)
	$(BIN)/pytest -n 2 --dist worksteal -m "not (ray or slow or long)"

test-slow: $(TESTABLE)
	$(BIN)/pytest -n 2 --dist worksteal -m "slow and not (ray or long)"

# One session, so that one cluster, its data and its reference runs are made once.
test-ray: $(TESTABLE)
	$(BIN)/pytest -m "ray and not long"

test-ray-all: $(TESTABLE)
	$(BIN)/pytest -m ray

test-long: $(TESTABLE)
	$(BIN)/pytest -rs -m "long and not ray"

test-chaos: $(TESTABLE)
	$(BIN)/python -m tests.faults.chaos

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
check check-all: $(TESTABLE)
	@echo "two targets at a time; each prints its output when it ends"
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target $(@:check%=checks%)

# Threads that wait must not spin: the other target uses the core.
checks checks-all: export OMP_WAIT_POLICY := PASSIVE
checks: format lint test-ray test-fast test-slow test-readme-short types
checks-all: format lint test-ray-all test-long test-fast test-slow test-readme-short types

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
