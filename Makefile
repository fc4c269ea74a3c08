# make train, quick, test, bench, bench-techniques, gpu, style; the first one creates .venv and installs requirements.txt
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# make train CONFIG=multi_gpu takes that one of accelerate_configs/; without it, what this machine computes fastest.
CONFIG ?=
RECIPE ?= lm
ARGS ?=
TESTS ?= tests

.PHONY: train quick test bench bench-techniques gpu style clean

train: $(VENV)/installed
	@test -f recipes/$(RECIPE).py || { echo "error: there is no recipes/$(RECIPE).py; RECIPE is one of" \
	  $(patsubst recipes/%.py,%,$(wildcard recipes/*.py)) >&2; exit 2; }
	$(BIN)/accelerate launch $(if $(CONFIG),--config_file accelerate_configs/$(CONFIG).yaml,\
	  $(shell $(BIN)/python -m common.parallel.precision_choice $(RECIPE))) recipes/$(RECIPE).py $(ARGS)

test: $(VENV)/installed
	$(BIN)/python -m common.parallel.extensions
	$(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder --durations 25 $(TESTS)

# The tests nearest to what has changed, or the core if nothing has, in under three minutes.
quick: $(VENV)/installed
	$(BIN)/python tests/quick.py

bench: $(VENV)/installed-bench
	$(BIN)/python benchmarks/throughput.py --output_dir runs/benchmarks $(ARGS)

# Each technique for memory or speed alone, then what pays together; half an hour on two cores. Stopped, it goes on.
bench-techniques: $(VENV)/installed
	$(BIN)/python benchmarks/techniques.py --output_dir runs/benchmarks $(ARGS)

# On a machine with a GPU: what only it can show, then speed, what a process holds, and saves; the results lie in
# benchmarks/results/. A test that fails does not keep the rest from being measured, and is the status at the end.
gpu: $(VENV)/installed-bench
	@$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || \
	  { echo "error: torch sees no GPU here, and make gpu needs one; compare torch's CUDA version with the driver's in nvidia-smi" >&2; exit 2; }
	$(BIN)/python -m pip install --quiet liger-kernel==0.8.5
	$(BIN)/python -m common.parallel.extensions
	$(BIN)/python -m pytest -v --no-header --tb=short --durations 10 tests/test_gpu.py 2>&1 | sed 's|$(CURDIR)/||g' | \
	  tee benchmarks/results/tests-gpu.txt
	$(BIN)/python benchmarks/throughput.py
	$(BIN)/python benchmarks/sharding.py
	$(BIN)/accelerate launch --config_file accelerate_configs/single_gpu.yaml benchmarks/checkpoint.py
	@tail -1 benchmarks/results/tests-gpu.txt | grep passed | grep -vE 'failed|error'

style: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

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
