# Two commands do everything on a fresh machine with Python >= 3.10, a C++ compiler and make:
#   make demo      sets up .venv and trains a small mixture-of-experts model over two processes
#   make test      sets up .venv if missing, then runs the tests
# PYTHON chooses the interpreter that .venv is made with; PIP_FLAGS is passed to pip (an index, for example);
# DEMO_FLAGS, TEST_FLAGS and BENCH_FLAGS are passed on.

PYTHON ?= python3
PIP_FLAGS ?=
VENV ?= .venv
BIN := $(VENV)/bin
NATIVE := $(wildcard csrc/*.cc csrc/*.h csrc/*/*.cc csrc/*/*.h)

# Tests that have a command of their own, so that `make test` takes minutes.
COMPILING := tests/test_triton_compile.py tests/test_grouped_gemm_launches.py
BETWEEN_HOSTS := $(wildcard tests/test_multi_host*.py)
APART := $(COMPILING) $(BETWEEN_HOSTS)

.PHONY: help setup demo test test-kernels test-hosts lint format sanitize bench clean
.DEFAULT_GOAL := help

help:
	@echo "make demo      train a small mixture-of-experts model over two processes"
	@echo "make test      run the tests"
	@echo "make test-kernels  run those of the Triton kernels, interpreted and compiled"
	@echo "make test-hosts    run those between hosts, in network namespaces of this machine (root)"
	@echo "make lint      ruff, mypy, clang-format"
	@echo "make format    let ruff and clang-format rewrite the sources"
	@echo "make sanitize  the native part under address, undefined-behaviour and thread sanitizers"
	@echo "make bench     dispatch and combine against the memory bound and against all-to-all dispatchers"
	@echo "make clean     remove what was built, .venv included"

setup: $(VENV)/.built

# The stamps make a second run instant: dependencies are installed again only when their files change,
# the native part is built again only when its sources do.
$(VENV)/.installed: pyproject.toml constraints.txt constraints-triton.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "Python >= 3.10 is needed; $(PYTHON) is $$($(PYTHON) --version). Say PYTHON=..."; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(PIP_FLAGS) -c constraints.txt -e '.[dev,cli]'
	$(BIN)/python -c 'import triton' 2>/dev/null || \
		$(BIN)/python -m pip install --quiet $(PIP_FLAGS) -c constraints-triton.txt triton || \
		echo "Triton is not available here; its tests are skipped"
	touch $@

$(VENV)/.built: $(VENV)/.installed setup.py $(NATIVE)
	$(BIN)/python setup.py --quiet build_ext --inplace
	touch $@

demo: setup
	$(BIN)/moecomm demo $(DEMO_FLAGS)

test: setup
	$(BIN)/python -m pytest --ignore tests/triton $(APART:%=--ignore %) $(TEST_FLAGS)

# Triton kernels in its interpreter, which is slow and lets one thread of a process run at a time, so there are two; then
# compiled for GPUs.
test-kernels: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile $(TEST_FLAGS) tests/triton
	$(BIN)/python -m pytest $(TEST_FLAGS) $(COMPILING)

# Hosts within this machine: network namespaces, which need root, and UCX.
test-hosts: setup
	$(BIN)/python -m pytest -rs $(TEST_FLAGS) $(BETWEEN_HOSTS)

lint: setup
	scripts/check $(BIN)

format: setup
	$(BIN)/ruff check --fix --quiet . || true
	$(BIN)/ruff format .
	scripts/native-sources | xargs $(BIN)/clang-format -i

sanitize:
	scripts/sanitize

bench: setup
	$(BIN)/moecomm bench $(BENCH_FLAGS)

clean:
	rm -rf $(VENV) build dist *.egg-info demo-out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f moecomm/_C*.so
