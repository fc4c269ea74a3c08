# make train, quick, test, bench, bench-techniques, gpu, style, lock: the first call creates .venv and installs
# requirements.lock. With VENV=DIR, every target uses the existing environment DIR, and installs nothing. DIR/bin must
# contain python and accelerate. For the activated environment:
#     make gpu VENV=$(python -c "import sys; print(sys.prefix)")
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ifeq ($(VENV),.venv)
INSTALLED := $(VENV)/installed
INSTALLED_BENCH := $(VENV)/installed-bench
else ifneq ($(words $(wildcard $(BIN)/python $(BIN)/accelerate)),2)
$(error $(BIN) does not contain both python and accelerate; set VENV to an environment that does, or leave it out)
endif
# make train CONFIG=multi_gpu uses accelerate_configs/multi_gpu.yaml; by default, the fastest config for this machine.
CONFIG ?=
RECIPE ?= lm
# By default, recipes/lm.py trains for about two minutes on two cores, with the best of benchmarks/first_run_sweep.py.
ARGS ?= $(if $(CONFIG)$(filter-out lm,$(RECIPE)),,--optimizer muon --num_updates 950)
TESTS ?= tests
# On a CPU with glibc, memory that is freed is used again; other systems ignore it: see docs/cpu.md.
MALLOC := glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=2000000000:glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0

.PHONY: train quick test bench bench-techniques gpu style lock clean

train: $(INSTALLED)
	@test -f recipes/$(RECIPE).py || { echo "error: there is no recipes/$(RECIPE).py; RECIPE is one of" \
	  $(patsubst recipes/%.py,%,$(wildcard recipes/*.py)) >&2; exit 2; }
	@test -z "$(CONFIG)" || test -f accelerate_configs/$(CONFIG).yaml || { \
	  echo "error: there is no accelerate_configs/$(CONFIG).yaml; CONFIG is one of" \
	  $(patsubst accelerate_configs/%.yaml,%,$(wildcard accelerate_configs/*.yaml)) >&2; exit 2; }
	GLIBC_TUNABLES=$${GLIBC_TUNABLES:-$(MALLOC)} $(BIN)/accelerate launch $(if $(CONFIG),--config_file accelerate_configs/$(CONFIG).yaml,\
	  $(shell $(BIN)/python -m common.parallel.precision_choice $(RECIPE))) recipes/$(RECIPE).py $(ARGS)

test: $(INSTALLED)
	$(BIN)/python -m common.parallel.extensions
	$(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder --durations 25 $(TESTS)

# The tests closest to the changed files, or the core tests if nothing has changed, in less than three minutes.
quick: $(INSTALLED)
	$(BIN)/python tests/quick.py

bench: $(INSTALLED_BENCH)
	$(BIN)/python benchmarks/throughput.py --output_dir runs/benchmarks $(ARGS)

# Measures each technique for memory or speed alone, then the best combination, in half an hour on two cores. A second
# call resumes a stopped one.
bench-techniques: $(INSTALLED)
	$(BIN)/python benchmarks/techniques.py --output_dir runs/benchmarks $(ARGS)

# On a machine with a GPU: runs the tests that need one, then measures throughput, memory per process and saves. Results
# are written to benchmarks/results/. All parts run, even if one fails; the last line lists the failed parts.
gpu: SHELL := bash
gpu: .SHELLFLAGS := -o pipefail -c
gpu: $(INSTALLED_BENCH)
	@$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || \
	  { echo "error: torch sees no GPU here, and make gpu needs one; compare torch's CUDA version with the driver's in nvidia-smi" >&2; exit 2; }
	$(if $(INSTALLED),$(BIN)/python -m pip install --quiet --no-deps liger-kernel==0.8.5)
	@failed=; part() { echo "== $$1"; eval "$$2" || failed="$$failed, $$1"; }; \
	part "DeepSpeed's extensions" "$(BIN)/python -m common.parallel.extensions"; \
	part tests/test_gpu.py "$(BIN)/python -m pytest -v --no-header --tb=short --durations 10 tests/test_gpu.py 2>&1 | \
	  sed 's|$(CURDIR)/||g' | tee benchmarks/results/tests-gpu.txt"; \
	part benchmarks/throughput.py "$(BIN)/python benchmarks/throughput.py --sizes small 1b"; \
	part benchmarks/gpu_step.py "$(BIN)/python benchmarks/gpu_step.py"; \
	part benchmarks/sharding.py "$(BIN)/python benchmarks/sharding.py"; \
	part benchmarks/checkpoint.py "$(BIN)/accelerate launch --config_file accelerate_configs/single_gpu.yaml \
	  benchmarks/checkpoint.py"; \
	test -z "$$failed" || { echo "error: these parts failed: $${failed#, }" >&2; exit 1; }

style: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv

# requirements.lock pins all packages that requirements.txt requires, directly or indirectly, with the hashes of their
# files. For torch, requirements.txt pins only the version, because the files of torch and its CUDA libraries depend on
# the machine (CPU, CUDA, ROCm).
TORCH_PACKAGES := torch triton cuda-bindings cuda-pathfinder cuda-toolkit $(addprefix nvidia-,cublas cuda-cupti cuda-nvrtc \
  cuda-runtime cudnn-cu13 cufft cufile curand cusolver cusparse cusparselt-cu13 nccl-cu13 nvjitlink nvshmem-cu13 nvtx)
lock:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv==0.13.9
	UV_CUSTOM_COMPILE_COMMAND="make lock" $(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 \
	  --generate-hashes --no-annotate $(addprefix --no-emit-package ,$(TORCH_PACKAGES)) requirements.txt -o requirements.lock
	UV_CUSTOM_COMPILE_COMMAND="make lock" $(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 \
	  --generate-hashes --no-deps benchmarks/requirements.txt -o benchmarks/requirements.lock

$(VENV)/installed: requirements.txt requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than 3.11; name a newer one: make PYTHON=python3.12 ..." >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet $(shell grep ^torch== requirements.txt)
	touch $@

$(VENV)/installed-bench: $(VENV)/installed benchmarks/requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes -r benchmarks/requirements.lock
	touch $@
