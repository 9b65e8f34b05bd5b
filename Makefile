# Every target sets up what it needs: a virtual environment in .venv with torch, and this package installed in place.
# The second time that takes no time.
#
#   make demo    embed a small corpus with a real model, and compare eager, Inductor and Postlude
#   make test    the test suite
#   make lint    formatting, lint, types
#   make bench   the benchmarks behind the README's table
#   make bench-gpu   those on an NVIDIA GPU:  make bench-gpu TORCH=torch VENV=.venv-gpu
#   make clean   remove the virtual environment and caches of the tools
#
# To choose an interpreter:     make demo PYTHON=python3.12
# To choose another torch:      make test TORCH='torch==2.14.1' VENV=.venv-2.14
# To pass flags to a target:    make demo FLAGS=--quick       make test FLAGS='-k linear'

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
FLAGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# The model's files lie in an installed package: nothing is fetched at run time.
export HF_HUB_OFFLINE := 1

.PHONY: demo test lint format bench bench-gpu clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo
	$(BIN)/postlude demo $(FLAGS)

test: $(VENV)/.test
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal $(FLAGS)

lint: $(VENV)/.lint
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

format: $(VENV)/.lint
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

bench: $(VENV)/.bench
	$(BIN)/python benchmarks/cpu_linear_gelu.py --result cpu_linear_gelu $(FLAGS)
	$(BIN)/python benchmarks/cpu_minilm.py --result cpu_minilm $(FLAGS)
	$(BIN)/python benchmarks/compile_time.py --result compile_time
	$(BIN)/python benchmarks/call_overhead.py --result call_overhead
	$(BIN)/python benchmarks/accuracy.py --seeds 12 --result accuracy
	$(BIN)/python benchmarks/accuracy.py --generation --seeds 40 --result accuracy_generation
	$(BIN)/python benchmarks/tuned_zoo.py --result tuned_zoo

bench-gpu: $(VENV)/.bench $(VENV)/.cuda
	$(BIN)/python benchmarks/gpu_gemm.py --out benchmarks/results/gpu_gemm.json $(FLAGS)
	$(BIN)/python benchmarks/gpu_decode.py --out benchmarks/results/gpu_decode.json
	$(BIN)/python benchmarks/gpu_attention.py --out benchmarks/results/gpu_attention.json
	$(BIN)/python benchmarks/gpu_llama.py --out benchmarks/results/gpu_llama.json

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis

# torch comes first and alone, so that no other package's requirement chooses another build of it.
$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' || \
	  { echo "Postlude needs Python 3.11 to 3.14, and '$(PYTHON)' is not one. Choose another: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || \
	  { echo "'$(PYTHON)' has no venv module. On Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@echo "Setting up $(VENV) with $(TORCH) (once; a minute or more)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install '$(TORCH)'
	@touch $@

$(VENV)/.demo $(VENV)/.test $(VENV)/.lint $(VENV)/.bench $(VENV)/.cuda: $(VENV)/.%: $(VENV)/.torch pyproject.toml
	@echo "Installing postlude[$*]"
	@$(PIP) install --editable '.[$*]' '$(TORCH)'
	@touch $@
