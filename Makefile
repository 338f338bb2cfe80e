# The commands of the project; each is a few lines here and a script or a tool behind it.
# scripts/env.sh decides which CUDA, NCCL headers and MPI are used.

SHELL       := /bin/bash
.SHELLFLAGS := -euo pipefail -c
ARGS        ?=
# GNU's names, of which each may also be written in capitals; empty ones follow from prefix.
PREFIX      ?= /usr/local
prefix      ?= $(PREFIX)
libdir      ?= $(LIBDIR)
includedir  ?= $(INCLUDEDIR)
docdir      ?= $(DOCDIR)
# 1: install libnccl_ep.so.VERSION and a link to it.
VERSIONED   ?= 0

# A recipe that needs the environment starts with this.
env := . scripts/env.sh;
# What install.sh is told, whatever letters a folder has.
settings := $(foreach name,prefix libdir includedir docdir DESTDIR,$(name)='$(subst ','\'',$($(name)))') \
            versioned='$(VERSIONED)'
# What the C programs' own Makefile is told.
places := EP_LIBDIR="$$NCCL_EP_RELEASE" OUT="$$NCCL_EP_TARGET/c"

.DEFAULT_GOAL := help
.PHONY: help setup setup-lib setup-gpu setup-demo setup-gpu-tests setup-package lib header programs simt-programs \
        kernel-sizes run check \
        test test-all test-engines sanitize gpu-programs gpu-test gpu-package gpu-bench install uninstall wheel release \
        setup-wheel setup-plots plots setup-docs docs clean
# Two set-ups at once would fetch the same things.
.NOTPARALLEL:

help: ## Print this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 16
	@echo 'ARGS="..." is passed on by run-like targets, e.g. make test ARGS="--only ll --verbose"'

setup: ## Install what is missing: Open MPI by apt, pinned wheels into .deps/
	@scripts/setup.sh

setup-lib:
	@scripts/setup.sh --library

setup-gpu:
	@scripts/setup.sh --gpu

setup-demo:
	@scripts/setup.sh --demo

setup-gpu-tests:
	@scripts/setup.sh --gpu --pytest

setup-wheel:
	@scripts/setup.sh --library --wheel

setup-plots:
	@scripts/setup.sh --plots

setup-docs:
	@scripts/setup.sh --docs

setup-package:
	@scripts/setup.sh --pytest

lib: setup-lib ## Build the libraries of both interfaces and the CPU stand-ins
	@$(env) cargo build --release --locked --workspace; \
	    scripts/third_party.py "$$NCCL_EP_RELEASE/THIRD-PARTY.txt"

header: setup-lib ## Write include/nccl_ep.h anew from the Rust sources
	@$(env) NCCL_EP_CUDA=off NCCL_EP_UPDATE_HEADER=1 cargo test --locked --test header

programs: setup lib ## Build the C programs for this machine without GPU
	@$(env) $(MAKE) -C c_tests host $(places)

simt-programs: programs ## Build the C programs with the GPU kernels on the CPU
	@$(env) $(MAKE) -C c_tests simt $(places)

kernel-sizes: lib ## Show bytes of code, registers and shared memory of each kernel
	@$(env) scripts/kernel_sizes.py "$${NCCL_EP_RELEASE%/*}"

run: setup-demo ## Run an MoE layer and a short benchmark, on GPUs if there are any; ARGS="--nodes 2" on two nodes, "--long" shows all
	@scripts/demo.sh $(ARGS)

check: setup-lib ## Formatting, lints and documentation of the Rust code
	@$(env) export NVCC="$$PWD/scripts/testing/nvcc_stub.sh" RUSTDOCFLAGS="-D warnings"; cargo fmt --all --check; \
	    cargo clippy --locked --workspace --all-targets -- -D warnings; \
	    cargo doc --locked --workspace --no-deps --document-private-items

test: setup-lib ## Run the tests that need no GPU; ARGS="--list" shows them
	@scripts/run_tests.py $(ARGS)

test-all: setup-lib ## The same, and what takes long: sanitizers, more ranks and splits, all planted bugs
	@scripts/run_tests.py --all $(ARGS)

test-engines: setup-lib ## Run published files of SGLang, vLLM and others, which it fetches; LARGE=1 also TransformerEngine's library
	@$(env) [ -n "$${NCCL_EP_ENGINES:-}" ] || scripts/engines.py "$$NCCL_EP_DEPS/engines" $(if $(LARGE),--large)
	@scripts/run_tests.py --only engines $(ARGS)

sanitize: setup-lib ## Run the C programs with the address and undefined-behaviour sanitizers
	@scripts/run_tests.py --only sanitize $(ARGS)

gpu-programs: setup lib ## Build the C programs for a machine with GPUs
	@$(env) $(MAKE) -C c_tests gpu $(places)

gpu-test: setup-gpu-tests ## Run the C programs on the GPUs of this machine
	@scripts/gpu_test.py $(ARGS)

gpu-package: export NCCL_EP_CUDA = require
gpu-package: setup-package gpu-programs ## Gather what gpu-test needs on a machine without compilers
	@$(env) scripts/gpu_package.sh "$$NCCL_EP_TARGET/gpu-package"

gpu-bench: setup-gpu gpu-programs ## Benchmark on the GPUs of this machine, results in bench/results/, which git ignores
	@$(env) bench/run_sweep.py $(ARGS)

docs: setup-docs ## Make the site of the documents, with Sphinx: target/docs/index.html
	@$(env) PYTHONPATH="$$NCCL_EP_DEPS/docs" python3 -m sphinx -q -E -W --keep-going -c docs/site . \
	    "$$NCCL_EP_TARGET/docs" && echo "$$NCCL_EP_TARGET/docs/index.html"

plots: setup-plots ## Draw docs/plots/ anew from bench/results.csv, with matplotlib
	@$(env) PYTHONPATH="$$NCCL_EP_DEPS/plots" bench/plot.py

install: ## Install what `make lib` built: prefix (/usr/local), libdir, includedir, DESTDIR, VERSIONED=1
	@scripts/install.sh install $(settings)

uninstall: ## Remove what `make install` installed, with the same settings
	@scripts/install.sh uninstall $(settings)

wheel: lib setup-wheel ## Build the Python package with the library inside, and the one named deep_ep, in target/wheel
	@$(env) scripts/wheel.sh "$$NCCL_EP_TARGET/wheel"

release: export NCCL_EP_CUDA = require
release: lib setup-wheel ## Build what a release has, in target/release-files: tarball, wheels, checksums
	@$(env) scripts/release.sh "$$NCCL_EP_TARGET/release-files"

clean: ## Remove what was built; .deps/ stays
	@$(env) cargo clean && $(MAKE) -s -C c_tests clean $(places)
