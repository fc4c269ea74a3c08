# make train · make test · make bench · make style; the first one creates .venv and installs requirements.txt
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The machine's config: make train CONFIG=multi_gpu takes another one of accelerate_configs/.
CONFIG ?= $(shell nvidia-smi -L 2>/dev/null | grep -q GPU && echo single_gpu || echo cpu)
RECIPE ?= lm
ARGS ?=
TESTS ?= tests

.PHONY: train test bench style clean

train: $(VENV)/installed
	$(BIN)/accelerate launch --config_file accelerate_configs/$(CONFIG).yaml recipes/$(RECIPE).py $(ARGS)

test: $(VENV)/installed
	$(BIN)/python -m common.extensions
	$(BIN)/python -m pytest -q -n 3 --dist loadfile --durations 25 $(TESTS)

bench: $(VENV)/installed-bench
	$(BIN)/python benchmarks/throughput.py $(ARGS)

style: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV)

$(VENV)/installed: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than 3.11; name a newer one: make PYTHON=python3.12 ..." >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -r requirements.txt
	touch $@

$(VENV)/installed-bench: $(VENV)/installed benchmarks/requirements.txt
	$(BIN)/python -m pip install --quiet -r benchmarks/requirements.txt
	touch $@
