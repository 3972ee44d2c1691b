"""The project's requirements, as ranges; constraints.txt pins what `make` installs and the tests run with."""

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

RANGES = {
    "core": [
        "networkx>=3.6,<4", "pulp>=3.3.2,<4", "highspy>=1.8,<1.16", "rich>=13.9,<16", "numpy>=1.26,<3", "numba>=0.61,<1",
        "msgspec>=0.20,<1",
    ],  # fmt: skip
    "solvers": ["ortools>=9.12,<10", "pymetis>=2025.2"],
    "torch": ["torch>=2.11,<3", "safetensors>=0.5,<1"],
    "transformers": ["transformers>=5.8,<6"],
    "tensorflow": ["tensorflow>=2.18,<3", "safetensors>=0.5,<1"],
    "tensorflow-cpu": ["tensorflow-cpu>=2.18,<3", "safetensors>=0.5,<1"],
    "plots": ["matplotlib>=3.9,<4", "tensorboard>=2.18,<3"],
    "nvidia": ["nvidia-ml-py>=12.535,<14"],
    "yaml": ["pyyaml>=6,<7"],
    "completion": ["shtab>=1.7,<2"],
    "dev": [
        "pytest>=8.3,<10", "pytest-xdist>=3.6,<4", "hypothesis>=6.120,<7", "selenium>=4.27,<5",
        "ruff>=0.15,<1", "mypy>=2.4,<3", "types-networkx>=3.6,<4", "pdoc>=16,<17", "psutil>=7,<8", "shtab>=1.7,<2",
        "nbclient>=0.10,<1", "ipykernel>=6.29,<8",
    ],  # fmt: skip
}


def read_version() -> str:
    """`__version__` of baechi_ext, read as text: its dependencies need not be there yet."""
    text = (Path(__file__).parent / "baechi_ext" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if not found:
        raise RuntimeError('baechi_ext/__init__.py has no line __version__ = "..."')
    return found[1]


def read_description() -> str:
    """The README without its pictures and the links into this folder, which lead nowhere from a package index."""
    text = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)\n*", "", text)
    return re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]*\)", r"\1", text)


class BuildWithKernels(build_py):
    """Builds the package with its kernels compiled for this machine; on another one they are compiled when first used. A wheel that is made
    for others does without: BAECHI_KERNELS=0."""

    def run(self) -> None:
        super().run()
        root = Path(__file__).parent if self.editable_mode else Path(self.build_lib)
        if not self.editable_mode:
            shutil.rmtree(root / "baechi_ext" / "simulate" / "__pycache__", ignore_errors=True)
        if find_spec("numba") and os.environ.get("BAECHI_KERNELS") != "0":
            surroundings = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
            command = [sys.executable, "-m", "baechi_ext.place.kernels"]
            subprocess.run(command, cwd=root, env={**surroundings, "PYTHONDONTWRITEBYTECODE": "1"})


setup(
    cmdclass={"build_py": BuildWithKernels},
    name="baechi-ext",
    version=read_version(),
    description="Automatic device placement for training deep networks",
    long_description=read_description(),
    long_description_content_type="text/markdown",
    author="The baechi-ext developers",
    project_urls={
        "Baechi (SoCC 2020)": "https://doi.org/10.1145/3419111.3421302",
        "Placeto (NeurIPS 2019)": "https://arxiv.org/abs/1906.08879",
        "PaSE (IPDPS 2021)": "https://arxiv.org/abs/2407.04001",
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Programming Language :: Python :: 3.14",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    keywords="device placement, model parallelism, data parallelism, pipeline, sharding, PyTorch, TensorFlow",
    python_requires=">=3.11,<3.15",
    packages=[*find_packages(include=["baechi_ext*"]), *find_packages("runtime")],
    package_dir={"baechi_runtime": "runtime/baechi_runtime"},
    package_data={
        "baechi_runtime": ["py.typed"],
        "baechi_ext": ["py.typed"],
        "baechi_ext.datasets": ["graphs/*/index.json", "graphs/*/*.json.gz"],
        "baechi_ext.place": ["order_rules.json"],
        "baechi_ext.place.placeto": ["policies/*"],
        "baechi_runtime.report.page": ["*.html", "*.css", "*.js"],
    },
    install_requires=RANGES["core"],
    extras_require={name: needs for name, needs in RANGES.items() if name != "core"},
    entry_points={
        "console_scripts": ["baechi = baechi_runtime.__main__:main"],
        "torch_dynamo_backends": ["baechi = baechi_runtime.torch.calls.dynamo_backend:baechi"],
    },
)
