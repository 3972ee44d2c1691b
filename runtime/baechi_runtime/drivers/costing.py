"""A captured step's costs and a run's devices: as the request's files have them, or as a backend measures them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from baechi_ext.cost import Profile, attach_costs
from baechi_ext.cost.factors import with_links
from baechi_ext.cost.profile import Host
from baechi_ext.errors import ClusterError, MismatchError
from baechi_ext.ir import Cluster, OpGraph
from baechi_runtime.drivers import pipeline
from baechi_runtime.drivers.backend import Captured
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.measure.link_probe import LinkProbe
from baechi_runtime.report.findings import Findings
from baechi_runtime.report.printed import Profiled


@dataclass(frozen=True)
class KeptCosts(Findings):
    """A profile, and the file that `costgen` wrote it to."""

    profile: Profile
    file: str

    def report(self) -> Profiled:
        return Profiled(**self.profile.to_json())

    def lines(self) -> Iterator[str]:
        yield f"costs of {len(self.profile.ops)} ops written to {self.file}"


def costed(request: TrainRequest, graph: OpGraph, devices: Sequence[str], clock: str, measured: Callable[[], Profile]) -> Captured:
    """The graph with its costs, read from `cost_path`, where they have to be of this clock, or `measured`. `devices` are their names.

    Raises ProfileError, MismatchError, what `measured` raises, and first what hints and pins raise.
    """
    if not request.costgen:
        pipeline.prepared(graph, request.plan, devices)
    if request.cost_path is None or request.costgen:
        profile = measured()
    else:
        profile = Profile.load(request.cost_path, graph)
        if profile.clock != clock:
            raise MismatchError(
                f"{request.cost_path}: the costs are of the clock {profile.clock!r}, this run's devices go by {clock!r}; "
                "profile these devices with --costgen"
            )
    return with_costs(graph, profile, len(devices), host_of(request))


def with_costs(graph: OpGraph, profile: Profile, count: int, host: Host) -> Captured:
    """The graph with its costs on `count` devices, which one `host` or several give their work; see `attach_costs`."""
    placed = attach_costs(graph, profile, contended=count > 1, host=host)
    return Captured(placed, attach_costs(graph, profile, host=host), profile)


def host_of(request: TrainRequest) -> Host:
    """The threads that give ops to the request's devices; see `attach_costs`."""
    return "none" if request.as_graphs else "each" if request.workers == "process" else "one"


def cluster_of(
    request: TrainRequest, count: int, measured: Callable[[], tuple[Cluster, LinkProbe | None]]
) -> tuple[Cluster, LinkProbe | None]:
    """The request's cluster, or the `measured` one, and the link probe where there was one. Transfers take the host's time only where one
    thread gives all devices their work; see `host_of`.

    Raises ClusterError where a given cluster has not `count` devices, and what `measured` raises.
    """
    if request.cluster is not None and len(request.cluster) != count:
        raise ClusterError(
            f"the cluster file has {len(request.cluster)} devices and the run {count}; give --num_devices={len(request.cluster)}"
        )
    cluster, probe = measured() if request.cluster is None else (request.cluster, None)
    return cluster if host_of(request) == "one" else with_links(cluster, lambda link: replace(link, issue_us=0.0)), probe


def taking_up(cluster: Cluster, request: TrainRequest) -> Cluster:
    """The cluster with the memory that the request lets a plan take up, and the speeds that it gives. Raises ClusterError for speeds of
    another number of devices."""
    sizes = [device.memory_bytes if request.device_memory is None else request.device_memory for device in cluster.devices]
    limited = [None if size is None else int(size * request.memory_fraction) for size in sizes]
    cluster, given = cluster.each_with("memory_bytes", limited), request.device_speeds
    if given is None:
        return cluster
    if len(given) not in (1, len(cluster)):
        raise ClusterError(f"--device_speeds has {len(given)} speeds and the run {len(cluster)} devices; give as many, or one for all")
    return cluster.each_with("speed", given * (len(cluster) // len(given)))
