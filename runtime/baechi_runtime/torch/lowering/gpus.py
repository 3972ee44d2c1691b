"""The GPUs by the driver's management library (NVML, read with nvidia-ml-py): names, memory, use, and how they are tied."""

import contextlib
import importlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from baechi_ext.errors import MissingBackendError

_PATHS = {0: "one board", 10: "one PCIe switch", 20: "several PCIe switches", 30: "one PCIe host bridge", 40: "one NUMA node"}
_FARTHEST = "the link between processors"
_NVLINK, _OK = 2, 0
"""NVML_P2P_CAPS_INDEX_NVLINK and NVML_P2P_STATUS_OK."""
_SWITCH = 2
"""NVML_NVLINK_DEVICE_TYPE_SWITCH."""
BUSY = 0.1
"""A GPU that others use more than this share of the time is not measured undisturbed."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. `utilisation` is the share of the last sampling period in which a kernel ran."""

    name: str
    bus_id: str
    memory_bytes: int
    free_bytes: int
    utilisation: float
    pcie: str


@dataclass(frozen=True, slots=True)
class Tie:
    """The connection of two GPUs: over so many NVLinks, else over PCIe through `path`."""

    nvlinks: int
    path: str

    def __str__(self) -> str:
        return f"{self.nvlinks} NVLink{'s' * (self.nvlinks > 1)}" if self.nvlinks else f"PCIe through {self.path}"


@dataclass(frozen=True)
class Gpus:
    """The GPUs asked for, in their order, and the tie of every directed pair of them."""

    gpus: tuple[Gpu, ...]
    ties: dict[tuple[int, int], Tie]

    def alike(self) -> dict[Tie, list[tuple[int, int]]]:
        """The pairs by their ties: all pairs of a list have links alike."""
        found: dict[Tie, list[tuple[int, int]]] = {}
        for pair, tie in self.ties.items():
            found.setdefault(tie, []).append(pair)
        return found

    def lines(self) -> list[str]:
        """Describe the GPUs, and how they are tied together."""
        kinds = Counter(f"{gpu.name} ({gpu.pcie})" for gpu in self.gpus)
        found = ["GPUs: " + ", ".join(f"{count} x {kind}" for kind, count in kinds.items())]
        ties = [f"{tie}: {', '.join(f'{i}-{j}' for i, j in pairs if i < j)}" for tie, pairs in self.alike().items()]
        return [*found, "; ".join(ties)] if ties else found

    def busy(self) -> list[str]:
        """One line for each of them that others use."""
        shares = [(i, gpu) for i, gpu in enumerate(self.gpus) if gpu.utilisation > BUSY]
        return [f"cuda:{i} ({gpu.name}) was {gpu.utilisation:.0%} busy before this run began" for i, gpu in shares]


def read_gpus(uuids: Sequence[str] | None, nvml: Any = None) -> Gpus:
    """The GPUs of these UUIDs ("GPU-..."), or all that the driver knows. `nvml` stands in for the module pynvml.

    Raises MissingBackendError where nvidia-ml-py is not installed, the driver does not answer, or it knows no such GPU.
    """
    with _session(nvml) as nvml:
        if uuids is None:
            handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        else:
            handles = [nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
        gpus = tuple(_gpu(nvml, handle) for handle in handles)
        pairs = [(i, j) for i in range(len(handles)) for j in range(len(handles)) if i != j]
        ties = {(i, j): _tie(nvml, (handles[i], handles[j]), gpus[j].bus_id) for i, j in pairs}
    return Gpus(gpus, ties)


@contextlib.contextmanager
def _session(nvml: Any) -> Iterator[Any]:
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError as e:
            raise MissingBackendError(f"reading the GPUs' state needs nvidia-ml-py ({e}); pip install 'baechi-ext[nvidia]'") from e
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as e:
        raise MissingBackendError(f"the NVIDIA driver does not answer ({e}); check whether nvidia-smi runs here") from e
    try:
        yield nvml
    except nvml.NVMLError as e:
        raise MissingBackendError(f"the NVIDIA driver does not tell what was asked ({e}); nvidia-smi may say more") from e
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, handle: Any) -> Gpu:
    name, bus = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetPciInfo(handle).busId
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    generation = _answer(nvml, 0, nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle)
    width = _answer(nvml, 0, nvml.nvmlDeviceGetMaxPcieLinkWidth, handle)
    use = _answer(nvml, None, nvml.nvmlDeviceGetUtilizationRates, handle)
    return Gpu(
        name=_text(name),
        bus_id=_text(bus),
        memory_bytes=int(memory.total),
        free_bytes=int(memory.free),
        utilisation=0.0 if use is None else use.gpu / 100,
        pcie=f"PCIe {generation} x{width}" if generation and width else "PCIe",
    )


def _tie(nvml: Any, ends: tuple[Any, Any], bus_id: str) -> Tie:
    """NVLinks to the other end, or to a switch where the two are peers over NVLink."""
    peers = _answer(nvml, None, nvml.nvmlDeviceGetP2PStatus, *ends, _NVLINK) == _OK
    links = sum(_leads_to(nvml, ends[0], link, bus_id) for link in range(nvml.NVML_NVLINK_MAX_LINKS)) if peers else 0
    ancestor = _answer(nvml, None, nvml.nvmlDeviceGetTopologyCommonAncestor, *ends)
    return Tie(links, _PATHS.get(ancestor, _FARTHEST))


def _leads_to(nvml: Any, handle: Any, link: int, bus_id: str) -> bool:
    if not _answer(nvml, 0, nvml.nvmlDeviceGetNvLinkState, handle, link):
        return False
    if _answer(nvml, None, nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link) == _SWITCH:
        return True
    remote = _answer(nvml, None, nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
    return remote is not None and _text(remote.busId).lower() == bus_id.lower()


def _answer(nvml: Any, otherwise: Any, function: Any, *arguments: Any) -> Any:
    """The driver's answer, or `otherwise` if it does not know this of such a GPU."""
    try:
        return function(*arguments)
    except nvml.NVMLError:
        return otherwise


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
