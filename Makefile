# What a person, pre-commit and CI call. The environment is made on first use and again when requirements change.
SHELL := /bin/bash
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
export HF_HUB_DISABLE_TELEMETRY ?= 1
unexport PYTHONDONTWRITEBYTECODE  # else every process compiles torch and transformers again, 11 s each

CACHE := .pytest_cache
CLUSTER := PYTHONPATH=. $(BIN)/python

.PHONY: help env demo test test-local test-cluster test-again test-unit test-integration test-e2e test-control-plane test-nodes images cluster cluster-down \
	cluster-deps cluster-programs lint types bench docs lock clean
help: ## list the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | column -t -s "$$(printf '\t')"

env: $(STAMP) ## make the environment (.venv)
$(STAMP): requirements/all.txt pyproject.toml
	@set -e; \
	uv=$$(command -v uv || true); \
	if [ -z "$$uv" ]; then $(PYTHON) -m venv .uv && \
		.uv/bin/pip install --quiet --require-hashes -r worker_images/requirements/build.txt && uv=.uv/bin/uv; fi; \
	echo "making the environment in $(VENV): some 11 GB, minutes unless the packages are in uv's cache"; \
	[ -x $(BIN)/python ] || $$uv venv --quiet --python $(PYTHON) $(VENV); \
	$$uv pip sync --quiet --require-hashes --python $(BIN)/python requirements/all.txt; \
	$$uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .; \
	touch $(STAMP)

demo: env ## make a small model, train it with GRPO on this machine, print accuracy before and after
	@PATH="$(abspath $(BIN)):$$PATH" bash examples/arithmetic/demo.sh

test: env cluster-deps ## all tests; those that fail are run once more in the end, one by one, and only a second failure counts
	@rm -rf $(CACHE)
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target test-local test-cluster || $(MAKE) --no-print-directory test-again
test-local: env # one after the other, beside those of test-cluster, which often wait for an API server or a kubelet
	@for tests in unit integration e2e; do $(MAKE) --no-print-directory test-$$tests || failed=1; done; exit $${failed:-0}
test-cluster: env
	@for tests in control-plane nodes; do $(MAKE) --no-print-directory test-$$tests || failed=1; done; exit $${failed:-0}
test-again: env # run what failed once more: when a shared machine pauses, live processes look dead to each other
	@echo "what failed runs once more, with nothing beside it"
	@for tests in unit integration e2e control-plane nodes; do [ -e $(CACHE)/$$tests/passed ] || \
		$(MAKE) --no-print-directory test-$$tests ONCE_MORE="--last-failed -n 0" || failed=1; done; exit $${failed:-0}

# $(call pytest,tier,arguments): run the tests of a tier, and remember which failed; all of them if not all were run (codes other than 0 and 1).
define pytest
	$(BIN)/python -m pytest $(2) --tb=short -o cache_dir=$(CACHE)/$(1) $(ONCE_MORE) && touch $(CACHE)/$(1)/passed || \
		{ code=$$?; [ $$code = 1 ] || rm -rf $(CACHE)/$(1); exit $$code; }
endef
test-unit: env ## pure tests, seconds
	$(call pytest,unit,-n 2 --dist worksteal tests/unit)
test-integration: env ## real processes, sockets, tiny models; two files at once, as much of a file is waiting
	$(call pytest,integration,-n 2 --dist loadfile --no-loadscope-reorder tests/integration)
test-e2e: env ## real runs of the command, faults included; two at once
	$(call pytest,e2e,-n 2 --dist loadgroup tests/e2e)
test-control-plane: env cluster-programs ## the operator on real API servers, two at once, as it mostly waits; needs no root
	$(call pytest,control-plane,-n 2 --dist loadfile tests/cluster/control_plane)
test-nodes: env cluster-programs ## images, pods and jobs on real nodes; needs root
	$(call pytest,nodes,tests/cluster/nodes)

images: env ## build the images with buildah, once per content; needs root
	$(BIN)/python -m worker_images.build
cluster: env ## a two-node cluster with the operator installed, in .cluster; needs root
	$(CLUSTER) tests/cluster/deploy.py up
cluster-down: env ## remove the cluster and all that belongs to it
	$(CLUSTER) tests/cluster/deploy.py down
cluster-deps: env ## install the Debian packages that clusters run (only as root)
	@if [ $$(id -u) = 0 ]; then $(CLUSTER) -m tests.cluster.testcluster deps; else echo "not root: node tests need Debian packages, which they name"; fi
cluster-programs: env ## compile the cluster's programs, once per content (10 minutes on 2 cores)
	@$(CLUSTER) -m tests.cluster.testcluster build

lint: env ## ruff (lint and format), import contracts, circles of files, literal names of groups, file size, generated files
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python -m tests.lint.circles
	$(BIN)/python -m tests.lint.group_names
	$(BIN)/python -m tests.lint.pages
	$(BIN)/python -m tests.lint.sglang_arguments --check
	$(BIN)/python -m rl_core.cli.reference --check
	$(BIN)/python -m rljob_operator.crd --check
	@long=$$(git ls-files '*.py' | xargs wc -l | awk '$$1 > 500 && $$2 != "total"'); [ -z "$$long" ] || { echo "files over 500 lines (split by noun):"; echo "$$long"; exit 1; }

types: env ## mypy
	$(BIN)/mypy

bench: env ## every benchmark, JSON on standard output
	@for script in benchmarks/*.py; do case $$script in */_*) continue;; esac; echo "== $$script"; $(BIN)/python $$script; done

docs: env ## regenerate docs/reference, examples/reference.yaml, the CRD from the schema, and the list of SGLang's arguments
	$(BIN)/python -m tests.lint.sglang_arguments
	$(BIN)/python -m rl_core.cli.reference
	$(BIN)/python -m rljob_operator.crd

lock: ## compile requirements/all.txt from pyproject.toml
	PATH="$$PATH:$(abspath .uv/bin)" uv pip compile --quiet --generate-hashes --python-version 3.11 --no-header --extra all pyproject.toml -o requirements/all.txt
	PATH="$$PATH:$(abspath .uv/bin)" $(BIN)/python worker_images/lock.py

clean: ## remove the environment and caches
	rm -rf $(VENV) .uv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
