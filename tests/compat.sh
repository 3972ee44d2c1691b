#!/bin/sh
# Runs the torch tests with another release of torch than .venv has, in .venv-compat: `make test-compat`. COMPAT_TORCH names the release,
# COMPAT_PYTHON an interpreter, COMPAT_TESTS other tests; arguments are passed on to pytest.
set -eu
cd "$(dirname "$0")/.."
here=.venv-compat torch=${COMPAT_TORCH:-2.11}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

fail() { echo "error: $1" >&2; exit 1; }

found=
for candidate in ${COMPAT_PYTHON:-python3.12 "$HOME"/.pyenv/versions/3.12.*/bin/python "$HOME"/.local/share/uv/python/cpython-3.12.*/bin/python}; do
    if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then found=$candidate; break; fi
done
[ -n "$found" ] || fail "torch $torch is tried with ${COMPAT_PYTHON:-Python 3.12}, and there is none here (with venv); install it, e.g. apt install \
python3.12 python3.12-venv, or name one: make test-compat COMPAT_PYTHON=/path/to/python3.12"

wanted=$(cat setup.py constraints.txt; echo "$torch"; "$found" -VV)
if [ "$(cat "$here/installed" 2>/dev/null)" != "$wanted" ]; then
    echo "installing torch $torch for $("$found" -V) into $here; a build for CUDA takes some 5 GB"
    "$found" -m venv --clear "$here"
    # torch brings the setuptools that it goes with.
    { grep -v -E '^(torch|setuptools)==' constraints.txt; echo "torch==$torch.*"; } > "$here/constraints.txt"
    "$here/bin/python" -m pip install -q -c "$here/constraints.txt" -e '.[torch,transformers,solvers,plots,dev]' ||
        fail "torch $torch for $("$found" -V) cannot be installed; what pip says of it stands above"
    # Not by echo, which reads setup.py's backslashes in some shells: everything was installed each time.
    printf '%s\n' "$wanted" > "$here/installed"
fi
PYTHONPATH=$PWD "$here/bin/python" -c 'import platform, torch; print(f"torch {torch.__version__}, Python {platform.python_version()}")'
PYTHONPATH=$PWD exec "$here/bin/python" -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder --durations=10 ${COMPAT_TESTS:-tests/capture tests/runtime tests/place/placeto \
    tests/cli/test_pase.py tests/cli/test_probe_links.py tests/cli/test_train*.py} "$@"
