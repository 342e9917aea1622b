# fusewire: `make help` lists what there is. Needs python3 (3.11 or newer) with its venv module, and make. No root.

PYTHON ?= python3
CONFIG ?= config/dev.toml
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test lint types test-gpu test-systemd fuzz campaign run bench-quick bench bench-gpu soak clean

help: ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r target text; do printf '%-20s %s\n' "$$target" "$$text"; done

demo: $(STAMP) ## the main job, shown on a real checkpoint: shards in, fused layers out, tokens compared
	@$(BIN)/fusewire demo

test: lint types ## lint, types and tests
	$(BIN)/pytest -n 2 --dist worksteal

lint: $(STAMP) ## ruff: rules and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(STAMP) ## mypy, strict
	$(BIN)/mypy

test-gpu: $(STAMP) ## the tests that need a CUDA device
	$(BIN)/pytest -m gpu

test-systemd: $(STAMP) ## as root: the service on a Debian booted for it; needs debootstrap and systemd-nspawn
	$(BIN)/python tests/nspawn.py

fuzz: $(STAMP) ## 100,000 hostile inputs for everything that reads what comes from outside
	$(BIN)/python tests/fuzz/run.py

campaign: $(STAMP) ## 200 times kill -9 while versions come; after each, every byte is compared
	$(BIN)/python -u tests/campaign.py

run: $(STAMP) ## a daemon in this checkout; CONFIG=FILE for other settings than config/dev.toml
	@mkdir -p run/shards
	@exec $(BIN)/fusewire run --config $(CONFIG)

bench-quick: $(STAMP) ## the shorter part of them, in about a minute and a half
	$(BIN)/python benchmarks/folder.py --quick
	$(BIN)/python benchmarks/latency.py --quick
	$(BIN)/python benchmarks/overhead.py --quick
	@$(BIN)/python benchmarks/report.py --quick

bench: $(STAMP) ## benchmarks; ratios to a memcpy measured in the same run; writes docs/performance.md
	$(BIN)/python benchmarks/folder.py
	$(BIN)/python benchmarks/latency.py
	$(BIN)/python benchmarks/ingest.py
	$(BIN)/python benchmarks/names.py
	$(BIN)/python benchmarks/widths.py
	$(BIN)/python benchmarks/versions.py
	$(BIN)/python benchmarks/growth.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/peers.py
	@$(BIN)/python benchmarks/report.py

bench-gpu: $(STAMP) ## from files to a GPU, beside a plain copy from pinned memory; needs a CUDA device
	$(BIN)/python benchmarks/gpu.py

soak: $(STAMP) ## 10,000 versions by both transports: memory, file descriptors and latency stay what they are
	$(BIN)/python benchmarks/soak.py

clean: ## remove everything that these targets made, .venv too
	rm -rf $(VENV) build dist run *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis benchmarks/results fuzz-failures
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Installed once, and again when what is to be installed changes. The stamp comes last: an interrupted installation is
# begun anew.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "fusewire needs Python 3.11 or newer, and '$(PYTHON)' is missing or older." >&2; \
	  echo "Install one and name it: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' has no venv module with pip. On Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "installing into $(VENV) (once; torch is large, this can take minutes)"
	@rm -f $@
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@
