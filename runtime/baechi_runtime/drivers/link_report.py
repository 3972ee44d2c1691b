"""Request and report of `baechi probe-links`: every directed pair of devices, tensors of 2^0 floats and more, a line per pair."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from pathlib import Path

from msgspec.structs import asdict

from baechi_ext.cost import bend_bytes
from baechi_ext.ir import Cluster, Device
from baechi_ext.ir.files import write_json
from baechi_ext.ir.made_by import signed
from baechi_runtime.drivers.train_request import DevicesRequest, refuse
from baechi_runtime.host.host_memory import available_bytes, usable_bytes
from baechi_runtime.measure.link_probe import LinkProbe, sound
from baechi_runtime.report.findings import Findings
from baechi_runtime.report.printed import Links, Pair
from baechi_runtime.report.progress import progress
from baechi_runtime.report.report import ProbedLink
from baechi_runtime.report.tables import as_size

_FLOAT_BYTES = 4
_COPIES = 6
"""Buffers of one size that a pair holds at a time, with room to spare."""


@dataclass(frozen=True, kw_only=True)
class ProbeRequest(DevicesRequest):
    """Links to be measured; the cluster that they make goes to `out`."""

    max_exponent: int = 29
    """Tensors of up to 2^this floats, or what memory allows."""
    samples: str | None = None
    """The file that every sample goes to; None: none is kept."""

    def __post_init__(self) -> None:
        """Raises OptionError for a device alone, and for parts of GPUs where they can't be had."""
        super().__post_init__()
        refuse(self.num_devices < 2, "a link has two ends; give --num_devices=2 or more")
        of_torch = self.split_gpu or self.use_free_memory
        refuse(of_torch and self.framework != "torch", "--split_gpu and --use_free_memory are for --framework=torch here; drop them")


@dataclass(frozen=True)
class LinkReport(Findings):
    """The probes of all directed pairs, and the cluster they make."""

    cluster: Cluster
    probes: dict[tuple[int, int], LinkProbe]
    notes: tuple[str, ...] = ()
    """The driver's notes on GPUs."""

    def lines(self) -> list[str]:
        """Per pair the cost function as Baechi prints it, how well it fits, and where it bends."""
        found = list(self.notes)
        for (source, target), probe in self.probes.items():
            fit, sizes = probe.fit, sorted(probe.samples_us)
            found.append(
                f"{self.cluster.devices[source].name} -> {self.cluster.devices[target].name}, {as_size(sizes[0])} to {as_size(sizes[-1])}"
            )
            found.append(f"Communication cost function: {fit.us_per_byte:.6g} x + {fit.latency_us:.6g}")
            if probe.copied:
                bend = bend_bytes(probe.medians())
                straight = "no bend" if bend is None else f"it bends at {as_size(bend)}"
                found.append(f"  fit: r2 {fit.r_squared:.3f}, typically off by {probe.typical_error():.0%}; {straight}")
            if probe.remark:
                found.append(f"  {probe.remark}")
            if probe.send is not None:
                found.append(f"  of which the sender is busy {probe.send}, the receiver {probe.receive}")
        return found

    def report(self) -> Links:
        names = [device.name for device in self.cluster.devices]
        pairs = [Pair(source=names[s], target=names[t], **asdict(ProbedLink.of(probe))) for (s, t), probe in self.probes.items()]
        return Links(cluster=self.cluster.to_json(), pairs=pairs)


def probe_all(
    request: ProbeRequest,
    devices: tuple[Device, ...],
    probe: Callable[[int, int, Sequence[int]], LinkProbe],
    *,
    parallel: bool,
    notes: tuple[str, ...] = (),
) -> LinkReport:
    """Probes every directed pair of devices; the report is written where the request says. `probe`: of a source and a target, with tensors
    of so many bytes; `parallel`: tensors are handed over without copies. Raises what `probe` raises."""
    names, probes = [d.name for d in devices], {}
    sizes = sizes_bytes(request.max_exponent, len(devices))
    for source, target in permutations(range(len(devices)), 2):
        with progress(f"probing {names[source]} -> {names[target]}"):
            probes[source, target] = sound(partial(probe, source, target, sizes), copies=not parallel)
    links = {(names[s], names[t]): probe.to_link() for (s, t), probe in probes.items()}
    cluster = Cluster(devices, next(iter(links.values())), links, parallel_transfers=parallel)
    report = LinkReport(cluster, probes, notes)
    if request.out is not None:
        cluster.save(Path(request.out), request.made_by)
    if request.samples is not None:
        write_json(request.samples, signed(report.to_json(), request.made_by))
    return report


def sizes_bytes(max_exponent: int, num_devices: int) -> tuple[int, ...]:
    """2^0 to 2^max_exponent floats, as far as the machine's free memory holds the copies that a pair keeps."""
    found = available_bytes()
    free = usable_bytes() if found is None else found
    fitting = [i for i in range(max_exponent + 1) if i == 0 or _FLOAT_BYTES * 2**i * _COPIES < free / num_devices * 2]
    return tuple(_FLOAT_BYTES * 2**i for i in fitting)
