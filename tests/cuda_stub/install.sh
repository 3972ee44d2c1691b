#!/bin/sh
# Makes .venv-cuda-stub: torch's build for CUDA without NVIDIA's libraries, CUDA's headers, what the project needs, and the pretended libraries.
set -eu
cd "$(dirname "$0")/../.."
here=.venv-cuda-stub torch=2.14.1 cuda=13.0
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore

fail() { echo "error: $1" >&2; exit 1; }

command -v gcc >/dev/null && command -v nm >/dev/null || fail "no gcc or nm; apt install gcc binutils libc6-dev"
wanted=$(cat setup.py constraints.txt "$0")
if [ "$(cat $here/installed 2>/dev/null)" != "$wanted" ]; then
    echo "installing torch $torch for CUDA $cuda into $here, without NVIDIA's libraries: some 530 MB are fetched, 1.6 GB kept"
    "${PYTHON:-python3}" -m venv --clear $here
    grep -v '^torch==' constraints.txt > $here/constraints.txt
    pip() { $here/bin/python -m pip install -q "$@" || fail "pip cannot install what $0 needs; its message stands above"; }
    pip --no-deps "torch==$torch"
    grep -q "^cuda.*'$cuda'" $here/lib/python3.*/site-packages/torch/version.py || fail "pip's torch $torch is no build for CUDA $cuda here"
    pip --no-deps --target $here/headers "nvidia-cuda-runtime==$cuda.*" "nvidia-cuda-crt==$cuda.*"
    pip -c $here/constraints.txt filelock sympy jinja2 networkx fsspec typing_extensions setuptools safetensors pytest hypothesis psutil numba
    pip -c $here/constraints.txt --no-build-isolation -e .
fi
$here/bin/python tests/cuda_stub/build.py >/dev/null
# Not by echo, which reads setup.py's backslashes in some shells: everything was installed each time.
printf '%s\n' "$wanted" > $here/installed
