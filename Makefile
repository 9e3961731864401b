# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Python 3.11 or newer is needed; the environment is .venv in the checkout unless VENV= says otherwise.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
GPU_PYTHON ?= $(BIN)/python

.PHONY: help install demo test lint types check proto docs bench campaign gpu clean

help:  ## Show what can be made
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/' | expand -t 18

$(STAMP): pyproject.toml constraints-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "tiercache needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-dev.txt -e '.[dev]'
	@touch $(STAMP)

install: $(STAMP)  ## Create the environment and install everything into it

demo: $(STAMP)  ## Serve a hybrid model through device, host and disk, and over a kill -9
	$(BIN)/tiercache demo $(ARGS)

test: $(STAMP)  ## Run the tests
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP)  ## Style and import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(STAMP)  ## mypy --strict on all three packages
	$(BIN)/mypy

check: test lint types  ## Everything that CI runs on the checkout

proto: $(STAMP)  ## Generate tiercache/wire/v1 from proto/ (the tests compare)
	$(BIN)/python -m grpc_tools.protoc -Iproto --python_out=. --pyi_out=. proto/tiercache/wire/v1/*.proto

docs: $(STAMP)  ## Write docs/metrics.md from the table of metrics (the tests compare)
	$(BIN)/python -m tiercache.metrics > docs/metrics.md

bench: $(STAMP)  ## Benchmarks: keys, index, engine-thread cost, copies, local stores (one JSON line per row)
	$(BIN)/python -m tests.benchmarks
	$(BIN)/tiercache bench disk --backend file -o json
	$(BIN)/tiercache bench disk --backend lmdb -o json

campaign: $(STAMP)  ## Crash campaigns over the local stores: some 10 minutes, power cuts need root (ARGS=--quick)
	$(BIN)/python -m tests.campaign $(ARGS)

gpu:  ## What needs a CUDA device: tests, the kernel under compute-sanitizer, benchmark (GPU_PYTHON= one with torch for CUDA and CuPy)
	@command -v compute-sanitizer > /dev/null || { echo "make gpu needs compute-sanitizer, which comes with the CUDA toolkit; put it on the PATH"; exit 1; }
	$(GPU_PYTHON) -m pytest -m gpu $(ARGS)
	compute-sanitizer --tool memcheck --error-exitcode 1 $(GPU_PYTHON) -m pytest -m gpu tests/kernels $(ARGS)
	$(GPU_PYTHON) -m tiercache.cli bench device -o json

clean:  ## Remove the environment and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build
