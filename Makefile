# make            prints the targets below
# make setup      .venv, packages and Horovod; every other target does this first when it is needed
#
# Variables: PYTHON (interpreter that makes .venv), VENV (its folder), PYTEST_ARGS, CHAOS_ARGS and PYTEST_PROCESSES (for the tests),
# LAUNCHER (edlrun or horovodrun, for test-learning and imagenet-demo), DATA (folder in ImageNet's layout) and SCHEDULE (number
# of another schedule of what happens to the hosts) for imagenet-demo, SHORT=1 for all demos, EXACT=1 for it and distill-demo, BUILD_ARGS (for edl-hvd build-horovod).

SHELL := /bin/sh
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST_ARGS ?= tests --ignore tests/hosts --ignore tests/kubernetes --ignore tests/chaos --ignore tests/docs -m 'not learning and not distill'
# Elastic tests wait a good deal: four at a time keep two cores busy.
PYTEST_PROCESSES ?= 4
IMAGE ?= edl-hvd

# What is installed depends on these files only, what Horovod is built from on torch as well: a change of
# either gives another stamp, and an unchanged stamp makes a later call start at once.
RECIPE := $(wildcard edl_hvd/build/cmake/*.cmake edl_hvd/build/cmake/*/*.cmake edl_hvd/build/edits/*.py)
FINGERPRINT := $(shell cat setup.cfg pyproject.toml constraints.txt $(RECIPE) | cksum | tr ' ' '-')
TORCH = $(notdir $(wildcard $(VENV)/lib/python3.*/site-packages/torch-*.dist-info))
INSTALLED := $(VENV)/.installed-$(FINGERPRINT)
HOROVOD = $(VENV)/.horovod-$(FINGERPRINT)-$(TORCH)

# Programs of the environment come first, also for what they start themselves. Hundreds of processes read the same
# sources: each is compiled once, whatever the caller's shell says.
RUN := PATH="$(abspath $(BIN)):$$PATH" VIRTUAL_ENV="$(abspath $(VENV))" PYTHONDONTWRITEBYTECODE=

.DEFAULT_GOAL := help
.PHONY: help setup imagenet-demo cluster-demo distill-demo docs test test-docs test-distill test-learning test-chaos test-horovodrun test-hosts test-kubernetes lint format docker clean horovod preflight always

help: ## Print this list
	@printf '\n  Elastic training for PyTorch on Horovod\n\n'
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "    make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@printf '\n  The first call of a target sets everything up in %s (some minutes); later calls start at once.\n\n' '$(VENV)'

imagenet-demo: setup ## Train on real images while hosts join, die and leave; ends in a table and a picture
	@$(RUN) python examples/imagenet/demo.py

cluster-demo: setup ## Let three jobs and a service share four slots; ends in a table and a picture
	@$(RUN) python examples/cluster/demo.py

distill-demo: setup ## Kill teachers and resize their students; ends in a table and a picture
	@$(RUN) python examples/distill/demo.py

docs: $(INSTALLED) ## Build the documentation as a site, build/docs/index.html; a broken link fails
	@$(RUN) sphinx-build --fail-on-warning --quiet docs build/docs
	@echo 'build/docs/index.html'

test: setup ## Run the tests; PYTEST_ARGS='tests/unit/data/test_sampler.py -k resize' narrows them
	@$(RUN) python -m pytest --numprocesses $(PYTEST_PROCESSES) --dist worksteal $(PYTEST_ARGS)

test-docs: setup ## Run every command that the documents show
	@$(RUN) python -m pytest --numprocesses $(PYTEST_PROCESSES) --dist worksteal tests/docs

test-distill: setup ## Run the tests of distillation: students and teachers in processes of their own
	@$(RUN) python -m pytest --numprocesses $(PYTEST_PROCESSES) tests/unit/distill tests/elastic -m distill

test-learning: setup ## Run the long jobs whose losses, weights, samples and gradients are compared with one process's
	@$(RUN) python -m pytest --numprocesses $(PYTEST_PROCESSES) --dist worksteal tests/elastic tests/idioms -m learning --launcher $(or $(LAUNCHER),edlrun)

test-chaos: setup ## Run jobs with faults that a seed chooses; CHAOS_ARGS='--storms 100' for more
	@$(RUN) python -m pytest --numprocesses $(PYTEST_PROCESSES) --dist worksteal tests/chaos $(CHAOS_ARGS)

test-horovodrun: setup ## Run the elastic tests of the workers' side once more, under stock horovodrun
	@$(RUN) python -m pytest --numprocesses $(PYTEST_PROCESSES) --dist worksteal tests/elastic -m 'either and not learning' --launcher horovodrun

test-hosts: setup ## Run the tests over several hosts: ssh, network namespaces, Slurm (needs root and sshd)
	@$(RUN) python -m pytest --numprocesses 2 --dist worksteal tests/hosts

# What ../shared/kube unpacks is used where nothing else is named; the tests say it where neither is there.
test-kubernetes: setup ## Run the operator's tests on an API server (KUBEBUILDER_ASSETS names its programs)
	@assets="$$KUBEBUILDER_ASSETS"; \
	if [ -z "$$assets" ] && [ -x ../shared/kube/unpack.sh ]; then \
		assets=$$(../shared/kube/unpack.sh $(VENV)/kube) || assets=; \
	fi; \
	KUBEBUILDER_ASSETS="$$assets" $(RUN) python -m pytest --numprocesses 2 --dist worksteal tests/kubernetes $(KUBERNETES_ARGS)

lint: $(INSTALLED) ## Check style, types, import contracts and shell scripts
	@$(RUN) ruff check .
	@$(RUN) ruff format --check .
	@$(RUN) mypy
	@$(RUN) lint-imports --no-logo
	@$(RUN) shellcheck $$( (git ls-files '*.sh'; git grep -lE '^#!.*[/ ](ba|da)?sh$$' -- . ':!*.md' ':!*.py') | sort -u)

format: $(INSTALLED) ## Rewrite the sources in the house format
	@$(RUN) ruff check --fix .
	@$(RUN) ruff format .

docker: ## Build the image edl-hvd (GPU build; sshd for several hosts)
	docker build --tag $(IMAGE) .

clean: ## Delete .venv, caches and results
	rm -rf $(VENV) runs build *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

setup: $(INSTALLED) ## Make .venv, install the packages, build Horovod
	@$(MAKE) --no-print-directory horovod

# A make of its own, because the stamp's name holds the version of torch that was installed just before.
horovod: $(HOROVOD)
	@:

# Before minutes of downloading: what would only fail after them.
preflight:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
		echo "Python 3.10 or newer is needed; '$(PYTHON)' is missing or older. Name another: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "Python's venv module is missing; install it, e.g. apt-get install python3-venv" >&2; exit 1; }
	@command -v $${CXX:-c++} >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || { \
		echo "A C++ compiler is missing; install one, e.g. apt-get install g++" >&2; exit 1; }
	@$(PYTHON) -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null || { \
		echo "Python's headers are missing; install them, e.g. apt-get install python3-dev" >&2; exit 1; }

$(INSTALLED):
	@$(MAKE) --no-print-directory preflight
	@test -x $(BIN)/python || { echo "Making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "Installing the packages (torch is large: several minutes on a slow network)"
	@$(RUN) python -m pip install --constraint constraints.txt --editable '.[all]'
	@rm -f $(VENV)/.installed-*
	@touch $@

# Arguments given by hand are a wish to build anew.
$(HOROVOD): $(if $(BUILD_ARGS),always)
	@$(RUN) edl-hvd build-horovod $(BUILD_ARGS)
	@rm -f $(VENV)/.horovod-*
	@touch '$@'
