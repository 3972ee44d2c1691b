"""The flags of `baechi train` that have the step split over processes instead of placed."""

import argparse

from baechi_ext import hybrid
from baechi_ext.errors import OptionError
from runtime.flags.tensorflow import TENSORFLOW


def add_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--sharding",
        type=_names,
        default=(),
        metavar="NAMES",
        help="split every layer over worker processes instead of placing ops: pase (the cheapest way found), data_parallel, expert, ddp or "
        "fsdp2 (torch's own data parallelism), or a shard plan file; several with commas between them are compared",
    )
    group.add_argument("--mesh", type=_shape, metavar="NxN", help="the mesh of these processes (default: their number's prime factors)")


def settle(args: argparse.Namespace) -> None:
    """Makes --sharding's step run in worker processes, and that of a built-in model by hybrid. Raises OptionError where another flag
    contradicts --sharding."""
    on_cpu = args.framework != TENSORFLOW and args.num_gpus is None and args.split_gpu is None
    if args.placement_method == hybrid.METHOD and on_cpu and args.workers is None and args.script is None:
        args.workers = "process"
    if args.mesh is not None and not args.sharding:
        raise OptionError("--mesh is for --sharding; give --sharding=pase as well")
    if not args.sharding:
        return
    if args.script is not None:
        raise OptionError(f"--sharding splits a built-in model; baechi pase {args.script} finds how a script's layers are best split")
    for flag, given in {
        f"--framework={args.framework}": args.framework == TENSORFLOW,
        "--workers=thread": args.workers == "thread",
        "--costgen": args.costgen,
        "--cluster": args.cluster is not None,
    }.items():
        if given:
            raise OptionError(f"--sharding splits a built-in model of torch's over worker processes; drop {flag}")
    args.workers = "process"


def _names(text: str) -> tuple[str, ...]:
    """Flag type: names with commas between them, each once."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} names no strategy; give pase, data_parallel, expert, ddp, fsdp2 or a shard plan file")
    return names


def _shape(text: str) -> tuple[int, ...]:
    """Flag type: 2x2."""
    try:
        shape = tuple(int(part) for part in text.split("x"))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no mesh; give its sizes as 2x2")
    return shape
