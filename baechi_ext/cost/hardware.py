"""Costs on hardware that is not here: an op takes what its roofline there allows (Williams, Waterman and Patterson 2009) and the time to
start it; where it was measured elsewhere, its measured time by the ratio of both.

How far that is off was measured on CPU cores alone (`python -m benchmarks.hardware`): no figure of a GPU here has been held against one.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from baechi_ext.errors import OptionError, ProfileError
from baechi_ext.ir.cluster import Cluster, Link
from baechi_ext.ir.op_graph import Op, OpGraph

START_US = 10.0
"""The time to start an op, assumed for all hardware. On a CPU core, one with next to nothing to do takes two thirds of it or more
(`small_op_us` of benchmarks/results/hardware.json)."""
_CONVOLUTIONS = ("aten.convolution", "aten.convolution_backward")


@dataclass(frozen=True, slots=True)
class Hardware:
    """A kind of device: its figures, and where they are from. Those of links are of one direction between two of them."""

    name: str
    flop_per_us: float
    """Operations on 32-bit floating-point numbers."""
    convolution_flop_per_us: float
    """The same of convolutions, which PyTorch lets cuDNN compute with TF32 where there is that."""
    bytes_per_us: float
    memory_bytes: int
    link: Link
    source: str
    start_us: float = START_US
    shares_memory: bool = False
    """All devices of one machine share the memory."""

    def roofline_us(self, op: Op) -> float:
        """The least time of an op, in which it is started, too. One whose operations are not known is taken to move bytes alone.

        Raises ProfileError where those are not counted."""
        if op.moved_bytes is None:
            raise ProfileError(
                f"op {op.id!r} has no moved_bytes, so what it takes on {self.name} is not known; capture the graph again with "
                "baechi train --out (PyTorch)"
            )
        flop_per_us = self.convolution_flop_per_us if op.op in _CONVOLUTIONS else self.flop_per_us
        return self.start_us + max((op.flop or 0) / flop_per_us, op.moved_bytes / self.bytes_per_us)

    def cluster(self, count: int) -> Cluster:
        """`count` of these devices with equal links. Raises ClusterError for fewer than 1."""
        sharers = max(count, 1) if self.shares_memory else 1
        return Cluster.uniform(count, memory_bytes=self.memory_bytes // sharers, link=self.link, prefix=self.name)


_ASSUMED_LATENCY_US = 10.0
"""No data sheet says that of a link between GPUs."""


def _gpu(name: str, tera_flop: tuple[float, float], giga_bytes: tuple[float, float, float], source: str) -> Hardware:
    """`tera_flop` a second in FP32 and TF32; `giga_bytes`: memory, and a second of memory and of a link."""
    memory, memory_rate, link_rate = giga_bytes
    link = Link(1 / (link_rate * 1e3), _ASSUMED_LATENCY_US)
    single, tensor = (rate * 1e6 for rate in tera_flop)
    return Hardware(name, single, tensor, memory_rate * 1e3, int(memory * 1e9), link, source)


_SXM = "FP32 {} and TF32 {} TFLOP/s dense, {} TB/s, 80 GB, NVLink {} GB/s in both directions together (NVIDIA's data sheet of the {})"
HARDWARE = {
    h.name: h
    for h in (
        _gpu("h100", (67, 494.5), (80, 3350, 450), _SXM.format(67, 494.5, 3.35, 900, "H100 SXM")),
        _gpu("a100", (19.5, 156), (80, 2039, 300), _SXM.format(19.5, 156, 2.039, 600, "A100 80GB SXM")),
        _gpu(
            "rtx4090",
            (82.6, 82.6),
            (24, 1008, 32),
            "FP32 and TF32 82.6 TFLOP/s dense, 1.008 TB/s, 24 GB (NVIDIA's white paper on Ada), PCIe 4.0 x16 32 GB/s a direction",
        ),
    )
}
"""Published hardware by name."""
CPU = "cpu"
"""The name of this machine's cores, which are probed (baechi_runtime.torch.hardware_probe)."""


def hardware_named(name: str) -> Hardware:
    """The published hardware of that name. Raises OptionError for an unknown one."""
    if name not in HARDWARE:
        raise OptionError(f"unknown hardware {name!r}; choose one of {', '.join(HARDWARE)}")
    return HARDWARE[name]


@dataclass(frozen=True, slots=True)
class Spread:
    """Times measured on CPU cores, in parts of their prediction: the middle one, and two that 90% lie between."""

    middle: float
    low: float
    high: float

    def around(self, us: float) -> tuple[float, float]:
        """The least and the longest of a step that is predicted to take so long, if that is off by as much."""
        return us * self.low / self.middle, us * self.high / self.middle


COUNTED, SCALED = Spread(1.15, 0.54, 1.25), Spread(1.0, 0.86, 1.17)
"""Steps whose ops were counted alone, and those whose ops were measured elsewhere; from benchmarks/results/hardware.json."""
OF_OPS = Spread(COUNTED.middle, 0.5, 20.72)
"""Single ops that were counted, between which 90% of the time lies: a step may be as far off on hardware to which other ops come easily."""


def spread_on(target: Hardware, source: Hardware | None) -> Spread:
    """The spread to go by for costs on `target` of those that were measured on `source`, or counted."""
    if source is None:
        return COUNTED if target.name == CPU else OF_OPS
    return SCALED if (source.name == CPU) == (target.name == CPU) else OF_OPS


def costs_on(graph: OpGraph, target: Hardware, source: Hardware | None = None) -> OpGraph:
    """The graph with costs on `target`: those that it has, which were measured on `source`, by the ratio of the rooflines; or without that
    the rooflines themselves, longer by as much as steps were found to be. Raises ProfileError where ops are not counted."""

    def us(op: Op) -> float:
        return target.roofline_us(op) * (COUNTED.middle if source is None else op.compute_us / source.roofline_us(op))

    return graph.replace_ops([replace(op, compute_us=us(op)) for op in graph.ops])


def uncounted(ops: Iterable[Op]) -> tuple[str, ...]:
    """The kinds of ops whose operations are not known."""
    return tuple(sorted({op.op for op in ops if op.moved_bytes is not None and op.flop is None}))
