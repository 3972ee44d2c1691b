# make train | test | lint | docs | test-compat: each sets up .venv first, and again only where setup.py, pyproject.toml or constraints.txt changed.
PYTHON ?= python3
EXTRAS ?= torch,transformers,tensorflow-cpu,solvers,plots,dev
BIN := .venv/bin
STAMP := .venv/installed
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

.PHONY: train test test-compat lint docs

train: $(STAMP)
	$(BIN)/baechi train --model_name=inception_v3 --image_size=149 --batch_size=8 --placement_method=m_sct --num_devices=2 --out=runs/inception_v3
	$(BIN)/baechi report runs/inception_v3

# Two at a time, file by file: many tests wait for processes of their own.
test: $(STAMP)
	$(BIN)/python -m pytest -q -n 2 --dist loadfile

# The torch tests with the other release of torch that is supported, where it can be had; it takes a Python of its own.
test-compat: $(STAMP)
	COMPAT_PYTHON='$(COMPAT_PYTHON)' tests/compat.sh

lint: $(STAMP)
	$(BIN)/ruff check .

# The Python API from its docstrings.
docs: $(STAMP)
	TF_CPP_MIN_LOG_LEVEL=3 $(BIN)/python -W error -m pdoc -o build/api baechi_ext

$(STAMP): setup.py pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "error: no $(PYTHON); install Python 3.11 to 3.13, e.g. apt install python3 python3-venv" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' || { echo "error: $(PYTHON) is \
	$$($(PYTHON) -V); Python 3.11 to 3.13 is needed: apt install python3.11 python3.11-venv, then make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "error: $(PYTHON) cannot make virtual environments: \
	apt install $$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@
