"""What the project needs, as ranges; constraints.txt pins what `make` installs and the tests run with."""

import re
from pathlib import Path

from setuptools import find_packages, setup

RANGES = {
    "core": ["networkx>=3.6,<4", "pulp>=3.3.2,<4", "highspy>=1.8,<2", "rich>=13.9,<16", "numpy>=1.26,<3", "numba>=0.61,<1"],
    "solvers": ["ortools>=9.12,<10", "pymetis>=2025.2"],
    "torch": ["torch>=2.11,<3", "safetensors>=0.5,<1"],
    "transformers": ["transformers>=5.8,<6"],
    "tensorflow": ["tensorflow>=2.18,<3", "safetensors>=0.5,<1"],
    "tensorflow-cpu": ["tensorflow-cpu>=2.18,<3", "safetensors>=0.5,<1"],
    "plots": ["matplotlib>=3.9,<4", "tensorboard>=2.18,<3"],
    "nvidia": ["nvidia-ml-py>=12.535,<14"],
    "yaml": ["pyyaml>=6,<7"],
    "dev": ["pytest>=8.3,<10", "pytest-xdist>=3.6,<4", "hypothesis>=6.120,<7", "ruff>=0.15,<1", "selenium>=4.27,<5", "pdoc>=16,<17"],
}


def read_version() -> str:
    """`__version__` of baechi_ext, read as text: its dependencies need not be there yet."""
    text = (Path(__file__).parent / "baechi_ext" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if not found:
        raise RuntimeError('baechi_ext/__init__.py has no line __version__ = "..."')
    return found[1]


setup(
    name="baechi-ext",
    version=read_version(),
    description="Automatic device placement for training deep networks",
    python_requires=">=3.11,<3.14",
    packages=find_packages(include=["baechi_ext", "baechi_ext.*", "runtime", "runtime.*"]),
    package_data={
        "baechi_ext.datasets": ["graphs/*/index.json", "graphs/*/*.json.gz"],
        "baechi_ext.place": ["order_rules.json"],
        "baechi_ext.place.placeto": ["policies/*"],
        "runtime.report_page": ["*.html", "*.css", "*.js"],
    },
    install_requires=RANGES["core"],
    extras_require={name: needs for name, needs in RANGES.items() if name != "core"},
    entry_points={"console_scripts": ["baechi = runtime.__main__:main"]},
)
