# make demo          install what running needs, and train the quickstart model
# make test-fast     tests in one process, below a second each; installs what the tests need besides
# make test          test-fast, and the core promises on one Ray cluster
# make check         before a change: format, lint, types and the tests that guard every promise once
#   test-slow        seconds of a core without Ray: runs, compiled models, damaged files, process groups
#   test-ray         all on one Ray cluster: workers, sweeps, kills
#   test-readme-short  the commands of README and getting-started, shortened
# make check-all     what CI runs: check, and all tests marked `long`
#   test-ray-all     test-ray, further faults, and whole studies
#   test-long        clusters of their own, `ray up` on hosts made of namespaces (root), the notebook, larger models
# make test-gpus    commands on GPUs that are not there; the first time, downloads torch's CUDA build, 2 GB
# make test-chaos    kill a random process in each of 20 runs (20 minutes, not in CI)
# make test-readme   every command of README and getting-started, in a fresh clone and environment
# make null-gpu      count what is launched on a GPU that is not there (not in CI)
# make docs          a site of README and docs in build/site; checks their links
# make wheel         what cluster files install on every node: dist/
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Index of PyTorch's CPU build, 192 MB; PyPI's build brings CUDA, 3 GB.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
INSTALLED := $(VENV)/.installed
# With what the tests need besides.
TESTABLE := $(VENV)/.installed-dev
NOT_CHECKED := build/gpus-not-checked
# Bytecode is kept wherever make runs. Without it, every process compiles the package, every session the tests.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-fast test-slow test-ray test-ray-all test-long test-gpus test-chaos test-readme
.PHONY: test-readme-short null-gpu docs wheel check check-all checks checks-all format lint types clean

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
	$(BIN)/pytest -rs -m "long and not (ray or gpus)"

test-gpus: $(TESTABLE)
	@rm -f $(NOT_CHECKED)
	@benchmarks/null_gpu/run.sh; case $$? in \
	0) $(BIN)/pytest -m gpus;; \
	3) mkdir -p build && echo "GPUs were not checked: torch's CUDA build cannot be downloaded" | tee $(NOT_CHECKED);; \
	*) exit 1;; esac

test-chaos: $(TESTABLE)
	$(BIN)/python -m tests.faults.chaos

null-gpu: $(TESTABLE)
	benchmarks/null_gpu/run.sh benchmarks/null_gpu/check.py

test-readme: $(TESTABLE)
	$(BIN)/python -m tests.readme

test-readme-short: $(TESTABLE)
	$(BIN)/python -m tests.readme --short

# Material warns of mkdocs' second version.
docs: $(TESTABLE)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

wheel: $(INSTALLED)
	rm -rf build dist
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .
	cp constraints.txt dist/

# Two at a time, the longest first; each prints its output when it ends.
check check-all: $(TESTABLE)
	@echo "two targets at a time; each prints its output when it ends"
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target $(@:check%=checks%)
	@test ! -e $(NOT_CHECKED) || cat $(NOT_CHECKED)

# Threads that wait must not spin: the other target uses the core.
checks checks-all: export OMP_WAIT_POLICY := PASSIVE
checks: format lint docs test-ray test-fast test-slow test-readme-short types
checks-all: format lint docs test-ray-all test-gpus test-long test-fast test-slow test-readme-short types

format: $(TESTABLE)
	$(BIN)/ruff format --check .

lint: $(TESTABLE)
	$(BIN)/ruff check .

types: $(TESTABLE)
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info

# The versions are known, so four processes of pip install them without resolving, and another one torch. The last
# command adds what this list lacks, such as CUDA's libraries. Older pips take twice as long to read the indexes.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@torch=$$(grep ^torch== constraints.txt); install="$(BIN)/pip install --quiet --no-compile --no-deps"; \
	if nvidia-smi -L > /dev/null 2>&1; then index=; build="PyPI's build with CUDA, for the NVIDIA GPU"; \
	elif timeout 5 $(PYTHON) -c "import urllib.request as u; u.urlopen('$(TORCH_INDEX)/torch/')" 2> /dev/null; \
	then index="--index-url $(TORCH_INDEX)"; build="the CPU build, since there is no NVIDIA GPU"; \
	else index=; build="PyPI's build; there is no NVIDIA GPU, but $(TORCH_INDEX) does not answer"; fi; \
	case "$$index" in "") mb="at most 3000 MB (7 GB unpacked)";; *) mb="about 450 MB (1.5 GB unpacked)";; esac; \
	echo "installing $$torch into $(VENV), $$build; downloads $$mb"; \
	$$install --upgrade pip==26.3 && \
	{ echo "$$index $$torch"; sed '/^# Extras/,$$d; /^torch==\|^#/d' constraints.txt | xargs -n 30; } | \
	xargs -P 5 -L 1 $$install
	@PYTHONWARNINGS=ignore $(BIN)/pip install --quiet --no-compile --no-build-isolation -c constraints.txt -e .
	@echo "installed torch $$($(BIN)/python -c 'from importlib.metadata import version; print(version("torch"))')," \
	"$$(du -sm $(VENV) | cut -f1) MB in all"
	touch $@

$(TESTABLE): $(INSTALLED)
	$(BIN)/pip install -c constraints.txt -e '.[dev,docs]'
	touch $@
