# make train | test | fuzz | lint | docs | test-compat | test-cuda-stub | rehearse-gpu: each sets up .venv first, and again only where setup.py, pyproject.toml or constraints.txt changed.
PYTHON ?= python3
EXTRAS ?= torch,transformers,tensorflow-cpu,solvers,plots,dev
BIN := .venv/bin
STAMP := .venv/installed
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

.PHONY: train test test-compat test-cuda-stub rehearse-gpu fuzz lint docs

train: $(STAMP)
	$(BIN)/baechi train --model_name=inception_v3 --image_size=149 --batch_size=8 --placement_method=m_sct --num_devices=2 --out=runs/inception_v3
	$(BIN)/baechi report runs/inception_v3

# Three at a time, file by file, the longest first: many tests wait for processes of their own. The slowest ten are named at the end.
# A hundred processes import this code: compiled once, also where the environment says not to keep what is compiled.
test: export PYTHONDONTWRITEBYTECODE :=
test: $(STAMP)
	$(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder --durations=10

# The torch tests with the oldest torch, on Python 3.12, or with COMPAT_TORCH=2.15 COMPAT_PYTHON=python3.14, the newest that were tried; COMPAT_TESTS=tests for all.
test-compat:
	tests/compat.sh

CUDA_TESTS = tests/runtime/test_cuda_workers.py tests/runtime/test_graphed_calls.py tests/runtime/test_parallelize.py::test_two_cuda_devices

# The CUDA path on four pretended GPUs, whose kernels compute on the CPU: tests/cuda_stub/README.md. Their links have no speed to be probed.
test-cuda-stub:
	PYTHON='$(PYTHON)' tests/cuda_stub/install.sh
	tests/cuda_stub/python -m pytest -q -W ignore::DeprecationWarning tests/cuda_stub $(CUDA_TESTS) -k 'not probed'

# benchmarks/gpu_half_hour.sh from start to end on them, with small models.
rehearse-gpu:
	PYTHON='$(PYTHON)' tests/cuda_stub/install.sh
	CUDA_STUB_DEVICES=1 REHEARSE=1 PYTHON=tests/cuda_stub/python benchmarks/gpu_half_hour.sh runs/gpu_rehearsal

# A million edited files of all formats, by a seed that is drawn and printed: make fuzz FUZZ_CASES=100000 FUZZ_SEED=7 draws that one again.
FUZZ_CASES ?= 1000000
FUZZ_SEED ?=
fuzz: FUZZ_SEED := $(or $(FUZZ_SEED),$(shell od -An -N4 -tu4 /dev/urandom | tr -d ' '))
fuzz: $(STAMP)
	@echo "make fuzz FUZZ_CASES=$(FUZZ_CASES) FUZZ_SEED=$(FUZZ_SEED)"
	FUZZ_CASES=$(FUZZ_CASES) $(BIN)/python -m pytest -q -n 2 tests/fuzz --hypothesis-seed=$(FUZZ_SEED)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

# The names that baechi_ext hands out, from their docstrings.
docs: $(STAMP)
	TF_CPP_MIN_LOG_LEVEL=3 $(BIN)/python -W error -m tests.docs.api_pages build/api

# Kernels are compiled beside the downloads: the build, which would do it, then finds them.
$(STAMP): setup.py pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "error: no $(PYTHON); install Python 3.11 to 3.13, e.g. apt install python3 python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || { echo "error: $(PYTHON) is \
	$$($(PYTHON) -V); Python 3.11 to 3.13 is needed: apt install python3.11 python3.11-venv, then make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "error: $(PYTHON) cannot make virtual environments: \
	apt install $$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install -q -c constraints.txt numba setuptools
	$(BIN)/python -m baechi_ext.place.kernels & $(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e '.[$(EXTRAS)]' && wait $$!
	@touch $@
