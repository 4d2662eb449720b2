# Needs Python 3.11 or newer and nothing else: each command makes .venv the first time and reuses it.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin

.PHONY: help train test check lint house wheel try-wheel verify megatron-check replicated-check docs-check peers gpu-check gpu-bench gpu-table bench docs clean
.DEFAULT_GOAL := help

help:  ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "trimtab needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(VENV)

INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable

$(VENV)/trains: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) '.[train,plot]'
	@touch $@

$(VENV)/ready: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) '.[train,plot,megatron,dev]'
	@touch $(VENV)/trains $@

train: $(VENV)/trains  ## train a small Qwen3-MoE on 4 expert-parallel ranks, on the Python standard library's source
	$(BIN)/trimtab train --nproc 4 --out runs/first --overwrite

test: $(VENV)/ready  ## lint, types and the whole test suite
	$(MAKE) --no-print-directory lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup

check: $(VENV)/ready  ## an answer in two minutes: lint, types, and one small case of each room
	$(MAKE) --no-print-directory lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadgroup @tests/check.txt

lint: $(VENV)/ready  ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

house: $(VENV)/ready  ## what the package measures: lines of each room, what an import loads, private names of torch
	PYTHONPATH=tests $(BIN)/python -m helpers.house

wheel: $(BIN)/python  ## build dist/*.whl; the build takes what it needs by itself
	rm -rf dist
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

try-wheel: wheel  ## the wheel in a fresh environment without the repository: README's example and the quick ledger
	.ci/try-wheel

verify: $(VENV)/ready  ## the whole ledger, faults, fuzz and mutants; writes docs/ledger.md
	$(BIN)/trimtab verify --out runs/verify
	cp runs/verify/ledger.md docs/ledger.md
	PYTHONPATH=tests $(BIN)/python -m faults
	PYTHONPATH=tests $(BIN)/python -m fuzz 100000
	PYTHONPATH=tests $(BIN)/python -m fuzz.replication 10000
	PYTHONPATH=tests $(BIN)/python -m mutants

megatron-check: $(VENV)/ready  ## trimtab in Megatron-Core 0.16 and 0.19, every test; MEGATRON=0.18.2 for another release
	.ci/megatron-check

replicated-check: $(VENV)/ready  ## replicated experts on 2, 4 and 8 ranks: every transport, layout, kind and way to run
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 0 -m replicated_full tests/parallel

docs-check: $(VENV)/ready  ## every code block of the documentation, those that take minutes included
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 0 -m "" -rP tests/docs

peers: $(VENV)/ready  ## judge other libraries' MoE layers, each in .peers at its own version; writes docs/peers.md
	PYTHONPATH=tests DS_BUILD_OPS=0 $(BIN)/python -m peers --fetch
	PYTHONPATH=tests $(BIN)/python -m peers

# An interpreter that has a PyTorch for its GPU, as containers and clusters do, needs no set-up: GPU_PYTHON=python3
GPU_PYTHON ?= $(BIN)/python
GPU_READY  := $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(VENV)/ready)

gpu-check: $(GPU_READY)  ## on a GPU, 3 minutes: values, host waits, CUDA graphs, low precision on its own hardware
	PYTHONPATH=src $(GPU_PYTHON) -m benchmarks gpu --only machine kernels moe

gpu-bench: $(GPU_READY)  ## on a GPU, 8 minutes: that, a profile, layers beside transformers, tiles; writes runs/gpu/gpu.md
	PYTHONPATH=src $(GPU_PYTHON) -m benchmarks gpu

gpu-table: $(VENV)/ready  ## what Triton's compiler makes of the kernels of real layers for five GPUs, none needed: 5 minutes
	PYTHONPATH=tests:. OMP_NUM_THREADS=1 $(BIN)/python -m gpu_evidence.compiled

bench: $(VENV)/ready  ## race trimtab against peers and the limit, about 2 h; writes benchmarks/results; goes on where it was stopped
	$(BIN)/python -m benchmarks step
	$(BIN)/python -m benchmarks overhead
	$(BIN)/python -m benchmarks all

docs: $(VENV)/ready  ## the documentation as a site in docs/build, strictly: a broken link fails
	$(INSTALL) '.[docs]'
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/build

clean:  ## remove .venv and what the tools left
	rm -rf $(VENV) dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
