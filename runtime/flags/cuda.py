"""The flags about CUDA devices that `train` and `probe-links` share."""

import argparse

from baechi_ext.errors import OptionError
from runtime.flags import common as flags


def add_flags(group: argparse._ArgumentGroup) -> None:
    """--split_gpu and --use_free_memory."""
    group.add_argument(
        "--split_gpu", type=flags.number_of_devices, metavar="N", help="the first GPU as N devices, to try a plan for N on a single one"
    )
    group.add_argument(
        "--use_free_memory",
        action="store_true",
        help="GPUs hold what is free on them now, not what they have: a plan then depends on what else runs; needs nvidia-ml-py",
    )


def add_graphs_flag(group: argparse._ArgumentGroup) -> None:
    """--cuda_graphs."""
    group.add_argument("--cuda_graphs", action="store_true", help="replay a device's ops between transfers as a CUDA graph, where it pays")


def wants_cuda(args: argparse.Namespace) -> bool:
    """Whether the devices are CUDA devices. Raises OptionError where flags contradict each other."""
    if args.split_gpu is not None:
        for other in ("num_devices", "num_gpus"):
            if getattr(args, other) is not None:
                raise OptionError(f"--split_gpu and --{other} exclude each other; give one of them")
        if args.workers == "process":
            raise OptionError("--split_gpu is for one process; drop --workers=process")
        return True
    cuda = args.num_devices is None and args.num_gpus is not None
    if args.use_free_memory and not cuda:
        raise OptionError("--use_free_memory is for CUDA devices; add --num_gpus=N, or drop it")
    return cuda


def graphs_wanted(args: argparse.Namespace) -> bool:
    """--cuda_graphs. Raises OptionError where there can be none."""
    if args.cuda_graphs and (args.workers == "process" or not wants_cuda(args)):
        raise OptionError("--cuda_graphs is for CUDA devices of one process; add --num_gpus=N or --split_gpu=N, and no --workers=process")
    return args.cuda_graphs


def number_given(args: argparse.Namespace) -> int | None:
    """How many devices the flags name; None where they leave it open."""
    return args.split_gpu or (args.num_gpus if wants_cuda(args) else args.num_devices)
