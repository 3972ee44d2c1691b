"""Python reads this at its start where the folder is on PYTHONPATH: its pretended CUDA devices compute."""

import os

if os.environ.get("CUDA_STUB_KERNELS") != "none":
    from tests.cuda_stub import kernels

    kernels.install()
