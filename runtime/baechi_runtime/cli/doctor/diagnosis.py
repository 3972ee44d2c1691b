"""The examination: packages, devices, links, solvers and compiled parts, each with its state, what it costs, and the remedy."""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import baechi_ext
from baechi_ext.errors import MissingBackendError
from baechi_ext.python_process import command_of, surroundings
from baechi_runtime.cli.doctor.packages import PACKAGES, PYTHON, Package, fits
from baechi_runtime.host.host_memory import usable_bytes
from baechi_runtime.host.processor import available_cores, processor
from baechi_runtime.report.findings import Findings
from baechi_runtime.report.tables import as_size
from baechi_runtime.torch.lowering.gpus import Gpus, read_gpus

if TYPE_CHECKING:
    from baechi_runtime.report.printed import Doctor

OK, MISSING, UNTRIED, BROKEN = "ok", "missing", "untried", "broken"
"""Untried: installed in a version that the project was not made for."""
_SECONDS = 120.0
_DRIVER = Path("/proc/driver/nvidia/version")
Found = tuple[dict[str, Any] | None, str]
"""A probe's findings and an empty string; or None and why it failed."""


@dataclass(frozen=True, slots=True)
class Check:
    """One part of the examination. `costs` says what does not work where it is not ok, and `remedy` what to do: if possible, a command."""

    group: str
    name: str
    state: str
    found: str
    costs: str = ""
    remedy: str = ""
    needed: bool = False
    """Nothing can be placed without it."""


@dataclass(frozen=True)
class Diagnosis(Findings):
    """All checks, in the order in which people read them."""

    checks: tuple[Check, ...]

    @property
    def healthy(self) -> bool:
        """True if everything works that placing needs."""
        return not any(check.needed and check.state in (MISSING, BROKEN) for check in self.checks)

    def report(self) -> "Doctor":
        from baechi_runtime.report import printed  # here, as msgspec may be what is missing

        checks = (check if check.state != OK else replace(check, costs="", remedy="") for check in self.checks)
        return printed.Doctor(healthy=self.healthy, checks=[printed.Check(**asdict(check)) for check in checks])

    def lines(self) -> Iterator[str]:
        """For people: a line a check, and one each for costs and remedy where it is not ok."""
        width = max(len(check.name) for check in self.checks)
        group = ""
        for check in self.checks:
            if check.group != group:
                group = check.group
                yield f"{group}"
            yield f"  {check.name:<{width}}  {check.state:<7}  {check.found}".rstrip()
            if check.state != OK:
                indent = " " * (width + 13)
                yield f"{indent}{'it may break' if check.state == UNTRIED else 'without it: no'} {check.costs}"
                yield f"{indent}{check.remedy}"
        bad = [check.name for check in self.checks if check.state in (MISSING, BROKEN) and check.needed]
        yield ""
        yield f"broken: {', '.join(bad)}; nothing can be placed" if bad else "placing works; what is not ok costs no more than it says"


def examine() -> Diagnosis:
    """The state of this installation. Takes as long as importing torch does, where that is installed."""
    wanted = ["kernels", "lp", *(probe for probe, name in (("cp", "ortools"), ("torch", "torch")) if _package(name).version() is not None)]
    with ThreadPoolExecutor(2) as pool:
        probed = dict(zip(wanted, pool.map(_probed, wanted), strict=True))
    gpus, why = _gpus()
    return Diagnosis((*_versions(), *_devices(probed, gpus, why), *_links(probed, gpus), *_solvers(probed), *_compiled(probed)))


def _package(name: str) -> Package:
    return next(package for package in PACKAGES if package.name == name)


def _probed(name: str) -> Found:
    """Runs a probe of `baechi_runtime.cli.doctor.probe` in a process of its own: what it finds, or how it fails."""
    command = command_of("baechi_runtime.cli.doctor.probe", name)
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=surroundings(), timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        return None, f"could not be tried: {e}"
    if done.returncode < 0:
        return None, f"trying it ended a process by signal {-done.returncode}"
    if done.returncode:
        return None, (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return json.loads(done.stdout.splitlines()[-1]), ""


def _versions() -> Iterator[Check]:
    python = platform.python_version()
    costs = ("anything: the project is tried with Python 3.11 to 3.14", "make a virtual environment with one of these")
    yield Check("versions", "python", OK if fits(python, PYTHON) else UNTRIED, f"{python} ({sys.executable})", *costs)
    yield Check("versions", "baechi-ext", OK, f"{baechi_ext.__version__} ({Path(baechi_ext.__file__).parent})")
    for package in PACKAGES:
        found = package.version()
        state, said = (MISSING, "") if found is None else (OK, found)
        if found is not None and not fits(found, package.range):
            state, said = UNTRIED, f"{found}, not {package.range}"
        yield Check("versions", package.name, state, said, package.costs, package.remedy, package.needed)
    gmap = shutil.which("scotch_gmap") or shutil.which("gmap")
    yield Check("versions", "scotch", OK if gmap else MISSING, gmap or "", "--placement_method=scotch", "apt-get install scotch")


def _devices(probed: Mapping[str, Found], gpus: Gpus | None, why: str) -> Iterator[Check]:
    cores = len(available_cores())
    yield Check("devices", "CPU", OK, f"{cores} usable core{'s' * (cores != 1)}, {processor()}, {as_size(usable_bytes())} usable memory")
    if cores == 1:
        costs = ("gain from splitting over CPU devices: they take turns", "run where there are more")
        yield Check("devices", "second core", MISSING, "", *costs)
    torch, torch_why = probed.get("torch", (None, ""))
    if gpus is not None:
        for i, gpu in enumerate(gpus.gpus):
            yield Check("devices", f"GPU {i}", OK, f"{gpu.name}, {as_size(gpu.free_bytes)} of {as_size(gpu.memory_bytes)} free, {gpu.pcie}")
    else:
        known = ", ".join(torch["gpus"]) if torch is not None else ""
        costs = ("--num_gpus, --split_gpu; CPU devices work", "a machine with an NVIDIA GPU and driver; nvidia-smi shows them")
        yield Check("devices", "GPUs", OK if known else MISSING, known or why, *costs)
    if torch_why:
        yield Check("devices", "torch", BROKEN, torch_why, _package("torch").costs, "pip install --force-reinstall torch")
    elif torch is not None:
        cuda, seen = torch["cuda"], len(torch["gpus"])
        there = gpus is not None and not seen
        said = f"CUDA {cuda}, {seen} GPUs seen" if cuda else "a build for CPUs alone"
        hidden = bool(cuda) and "CUDA_VISIBLE_DEVICES" in os.environ
        build = "install the torch build for this driver's CUDA (pytorch.org says which)"
        costs = ("--num_gpus and --split_gpu with PyTorch", "unset CUDA_VISIBLE_DEVICES, which may hide the GPUs" if hidden else build)
        yield Check("devices", "torch's CUDA", MISSING if there or not cuda else OK, said, *costs)


def _gpus() -> tuple[Gpus | None, str]:
    """The GPUs that NVML shows; or why it shows none."""
    try:
        gpus = read_gpus(None)
    except MissingBackendError as e:
        return None, str(e) if _DRIVER.exists() else "no NVIDIA driver runs here"
    return (gpus, "") if gpus.gpus else (None, "the driver has none")


def _links(probed: Mapping[str, Found], gpus: Gpus | None) -> Iterator[Check]:
    yield Check("links", "threads", OK, "tensors by reference")
    for tie, pairs in gpus.alike().items() if gpus is not None else ():
        yield Check("links", "GPU to GPU", OK, f"{tie}: {', '.join(f'{i}-{j}' for i, j in pairs if i < j)}")
    torch, _ = probed.get("torch", (None, ""))
    if torch is None:
        return
    for name, costs in (("gloo", "--workers=process, several machines, --sharding"), ("nccl", "--workers=process with --num_gpus")):
        remedy = "pip install --force-reinstall torch" if name == "gloo" else "install a torch build for CUDA"
        yield Check("links", name, OK if torch[name] else MISSING, "between processes" * torch[name], costs, remedy)


def _solvers(probed: Mapping[str, Found]) -> Iterator[Check]:
    for name, probe, package in (("LP", "lp", "pulp"), ("CP", "cp", "ortools")):
        if probe not in probed:
            continue
        found, why = probed[probe]
        known = _package(package)
        said = why if found is None else f"{found['solver']}, tried on two variables"
        remedy = f"pip install --force-reinstall '{known.needs}'"
        yield Check("solvers", name, BROKEN if found is None else OK, said, known.costs, remedy)


def _compiled(probed: Mapping[str, Found]) -> Iterator[Check]:
    found, why = probed["kernels"]
    if found is None:
        remedy = "pip install --force-reinstall numba numpy"
        yield Check("compiled parts", "numba", BROKEN, why, _package("numba").costs, remedy, needed=True)
        return
    yield Check("compiled parts", "numba", OK, "compiles", needed=True)
    folder = found["folder"]
    empty = f"{folder}, empty: the first plan compiles, or now python -m baechi_ext.place.kernels"
    said = "no folder can be written" if folder is None else folder if found["compiled"] else empty
    costs = ("kept kernels: every command compiles them anew, half a minute each", "set NUMBA_CACHE_DIR to a folder that can be written")
    yield Check("compiled parts", "kernel cache", MISSING if folder is None else OK, said, *costs)
