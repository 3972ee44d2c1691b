"""The flags that choose TensorFlow instead of PyTorch, and those that are for it alone."""

import argparse
from typing import Any

from baechi_ext.errors import OptionError
from runtime.flags import common as flags
from runtime.models.registry import FRAMEWORKS
from runtime.tensorflow.coarse import COARSE, begins_coarse

TORCH, TENSORFLOW = "torch", "tensorflow"
DEFAULT_WORKERS = {TORCH: "thread", TENSORFLOW: "process"}


def add_framework_flag(group: argparse._ArgumentGroup) -> None:
    """--framework."""
    group.add_argument(
        "--framework",
        type=flags.one_of(dict.fromkeys(FRAMEWORKS)),
        default=TORCH,
        metavar="NAME",
        help=f"{', '.join(FRAMEWORKS)} (default %(default)s)",
    )


def add_host_flags(group: argparse._ArgumentGroup) -> None:
    """--cluster_hosts and --task_index."""
    group.add_argument(
        "--cluster_hosts",
        type=_hosts,
        metavar="HOST:PORT,...",
        help="TensorFlow: a device on each of these; the same command runs on every host, with its --task_index",
    )
    group.add_argument(
        "--task_index",
        type=flags.whole,
        metavar="N",
        help="which of --cluster_hosts this is; 0, the default, places and measures, the others serve",
    )


def _hosts(text: str) -> tuple[str, ...]:
    """Flag type: host:port of every device."""
    hosts = tuple(part.strip() for part in text.split(","))
    for host in hosts:
        name, _, port = host.rpartition(":")
        if not name or not port.isdigit() or not 0 < int(port) < 65536:
            raise argparse.ArgumentTypeError(f"{host!r} is not host:port; give one for each device, as alpha:2222,beta:2222")
        if hosts.count(host) > 1:
            raise argparse.ArgumentTypeError(f"{host!r} stands twice; give every device its own")
    return hosts


def settle(args: argparse.Namespace) -> None:
    """Fills in what depends on the framework: kind of workers, and with --cluster_hosts their number. Raises OptionError where flags
    contradict each other."""
    if args.workers is None:
        args.workers = DEFAULT_WORKERS[args.framework]
        if args.framework == TENSORFLOW and (args.split_gpu is not None or (args.num_devices is None and args.num_gpus is not None)):
            args.workers = "thread"  # one process drives all GPUs
    method = getattr(args, "placement_method", None)
    if args.framework == TENSORFLOW and method is not None and begins_coarse(method) and args.grouper is None and args.placer_type is None:
        args.grouper, args.placer_type = COARSE
    hosts = getattr(args, "cluster_hosts", None)
    if hosts is None:
        if getattr(args, "task_index", None) is not None:
            raise OptionError("--task_index is a place in --cluster_hosts; give that as well")
        return
    if args.framework != TENSORFLOW:
        advice = "with PyTorch start the workers by torchrun (docs/several_nodes.md)"
        raise OptionError(f"--cluster_hosts is for --framework=tensorflow; {advice}")
    if args.workers != "process":
        raise OptionError("--cluster_hosts names servers; drop --workers=thread")
    if args.num_devices not in (None, len(hosts)) or args.split_gpu is not None:
        raise OptionError(f"--cluster_hosts names {len(hosts)} devices; drop --num_devices and --split_gpu")
    if not 0 <= (args.task_index or 0) < len(hosts):
        raise OptionError(f"--task_index={args.task_index} is none of the {len(hosts)} places in --cluster_hosts, which begin with 0")
    args.num_devices = len(hosts)


def fields_of(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of a TrainRequest that these flags are."""
    return {"framework": args.framework, "cluster_hosts": args.cluster_hosts, "task_index": args.task_index or 0}
