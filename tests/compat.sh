#!/bin/sh
# Runs the torch tests with another release of torch than .venv has, in .venv-compat: `make test-compat`.
# COMPAT_PYTHON names an interpreter for it; arguments are passed on to pytest.
set -eu
cd "$(dirname "$0")/.."
here=.venv-compat
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

fail() { echo "error: $1" >&2; exit 1; }

usable() { "$1" -c "import ensurepip, sys, venv; sys.exit('%d.%d' % sys.version_info[:2] != '$python')" 2>/dev/null; }

has=$(.venv/bin/python -c 'import torch; print(torch.__version__)') || fail "no torch in .venv; run make .venv/installed first"
case $has in
    2.11.*) torch=2.13 python=3.11 ;;
    *) torch=2.11 python=3.12 ;;
esac

found=
for candidate in ${COMPAT_PYTHON:-"python$python" "$HOME"/.pyenv/versions/"$python".*/bin/python "$HOME"/.local/share/uv/python/cpython-"$python".*/bin/python}; do
    if usable "$candidate"; then found=$candidate; break; fi
done
[ -n "$found" ] || fail "torch $torch is tried with Python $python, and there is none here (with venv); install it, e.g. apt install \
python$python python$python-venv, or name one: make test-compat COMPAT_PYTHON=/path/to/python$python"

wanted=$(cat setup.py constraints.txt; echo "$torch")
if [ "$(cat "$here/installed" 2>/dev/null)" != "$wanted" ]; then
    echo "installing torch $torch for Python $python into $here; a build for CUDA takes some 5 GB"
    "$found" -m venv --clear "$here"
    # torch brings the setuptools that it goes with.
    { grep -v -E '^(torch|setuptools)==' constraints.txt; echo "torch==$torch.*"; } > "$here/constraints.txt"
    "$here/bin/python" -m pip install -q -c "$here/constraints.txt" -e '.[torch,transformers,plots,dev]' ||
        fail "torch $torch for Python $python cannot be installed; what pip says of it stands above"
    echo "$wanted" > "$here/installed"
fi
PYTHONPATH=$PWD "$here/bin/python" -c 'import platform, torch; print(f"torch {torch.__version__}, Python {platform.python_version()}")'
PYTHONPATH=$PWD exec "$here/bin/python" -m pytest -q tests/capture tests/runtime tests/place/placeto \
    tests/cli/test_pase.py tests/cli/test_probe_links.py tests/cli/test_train*.py "$@"
