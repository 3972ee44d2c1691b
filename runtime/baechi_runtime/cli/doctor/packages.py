"""The packages that the project uses, as setup.py asks for them, and what does not work without each."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

PYTHON = ">=3.11,<3.15"
CORE = "core"
"""Stands for what `pip install baechi-ext` brings along; all else are extras."""


@dataclass(frozen=True, slots=True)
class Package:
    """`needs` is its requirement, by the first extra that has it; any of the distributions in `names` will do."""

    needs: str
    extra: str
    costs: str
    instead: str = ""
    """Another distribution that holds the same."""

    @property
    def name(self) -> str:
        return re.split("[<>=!~]", self.needs)[0]

    @property
    def needed(self) -> bool:
        """True if nothing can be placed without it."""
        return self.extra == CORE and self.name not in _SOLVERS

    @property
    def range(self) -> str:
        return self.needs.removeprefix(self.name)

    @property
    def remedy(self) -> str:
        return "pip install --force-reinstall baechi-ext" if self.extra == CORE else f"pip install 'baechi-ext[{self.extra}]'"

    def version(self) -> str | None:
        """The installed version, from its metadata, without importing anything; None where it is missing."""
        for name in filter(None, (self.name, self.instead)):
            try:
                return version(name)
            except PackageNotFoundError:
                continue
        return None


_SOLVERS = {"pulp", "highspy"}
"""These come along, for one method."""
_PLACING = "every command that places or simulates"
PACKAGES: tuple[Package, ...] = (
    Package("networkx>=3.6,<4", CORE, _PLACING),
    Package("pulp>=3.3.2,<4", CORE, "--placement_method=m_sct and m_sct_reserve"),
    Package("highspy>=1.8,<1.16", CORE, "m_sct with a quick solver: CBC takes its place where pulp brings it along"),
    Package("rich>=13.9,<16", CORE, "every command"),
    Package("numpy>=1.26,<3", CORE, _PLACING),
    Package("numba>=0.61,<1", CORE, _PLACING),
    Package("msgspec>=0.20,<1", CORE, "reports: train, compare, and --json of every command"),
    Package("torch>=2.11,<3", "torch", "train, compare and probe-links with PyTorch, baechi_ext.parallelize, datasets make, placeto"),
    Package("safetensors>=0.5,<1", "torch", "train --checkpoint, and --placement_method=placeto"),
    Package("transformers>=5.8,<6", "transformers", "--model_name=gpt2"),
    Package("tensorflow>=2.18,<3", "tensorflow", "--framework=tensorflow", instead="tensorflow-cpu"),
    Package("ortools>=9.12,<10", "solvers", "--placement_method=exact, and auto's proofs for small graphs"),
    Package("pymetis>=2025.2", "solvers", "--placement_method=metis"),
    Package("matplotlib>=3.9,<4", "plots", "baechi plot, and --plot"),
    Package("tensorboard>=2.18,<3", "plots", "train --tensorboard, placeto train --tensorboard"),
    Package("nvidia-ml-py>=12.535,<14", "nvidia", "--use_free_memory, and saying how GPUs are linked and who else uses them"),
    Package("pyyaml>=6,<7", "yaml", "--config=FILE.yaml (FILE.toml works without it)"),
    Package("shtab>=1.7,<2", "completion", "baechi --completion"),
)
CORE_MODULES = frozenset(package.name for package in PACKAGES if package.extra == CORE)
"""These are imported by the names that they are installed by."""


def fits(found: str, wanted: str) -> bool:
    """True if a version is in a range like ">=2.11,<3"; only the numbers at the beginning of a version count."""
    return all(_holds(found, condition) for condition in wanted.split(","))


def _holds(found: str, condition: str) -> bool:
    relation, bound = re.fullmatch(r"(>=|<)(.+)", condition).groups()  # type: ignore[union-attr]
    a, b = _numbers(found), _numbers(bound)
    width = max(len(a), len(b))
    below = [*a, *[0] * (width - len(a))] < [*b, *[0] * (width - len(b))]
    return below if relation == "<" else not below


def _numbers(text: str) -> Sequence[int]:
    return [int(n) for n in re.match(r"\d*(?:\.\d+)*", text)[0].split(".") if n]  # type: ignore[index]
