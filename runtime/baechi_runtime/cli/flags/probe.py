"""The flags of `baechi probe-links`, and the ProbeRequest they become. Reading them loads no framework; making the request does."""

import argparse
from typing import TYPE_CHECKING

from baechi_runtime.cli.flags import common as flags
from baechi_runtime.cli.flags import train as train_flags

if TYPE_CHECKING:
    from baechi_runtime.report.link_report import ProbeRequest


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `probe-links`."""
    cpus = f"CPU workers (default {train_flags.DEFAULT_DEVICES})"
    group = parser.add_argument_group("devices")
    group.add_argument("--num_devices", type=flags.number_of_devices, metavar="N", help=cpus)
    group.add_argument("--num_gpus", type=flags.number_of_devices, metavar="N", help="CUDA devices; --num_devices wins over it")
    train_flags.add_gpu_flags(group)
    workers = "thread or process (default thread; TensorFlow: process)"
    group.add_argument("--workers", type=flags.one_of(train_flags.WORKERS), metavar="KIND", help=workers)
    train_flags.add_framework_flag(group)
    group = parser.add_argument_group("run")
    group.add_argument(
        "--max_exponent", type=_exponent, default=29, metavar="E", help="tensors of 2^0 to 2^E floats, or what memory allows (default 29)"
    )
    group.add_argument("--timeout", type=flags.positive, default=300.0, metavar="SECONDS", help="for a device to answer (default 300)")
    group.add_argument("--out", metavar="FILE", help="write a cluster file, which --cluster reads")
    group.add_argument("--samples", metavar="FILE", help="keep every sample as JSON")
    group.add_argument("--json", action="store_true", help="print the report as JSON")


def _exponent(text: str) -> int:
    """Flag type: 3 to 29; a line and its bend need a few sizes."""
    value = flags.whole(text)
    if not 3 <= value <= 29:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 3 to 29")
    return value


def probe_request(args: argparse.Namespace) -> "ProbeRequest":
    """The request that the flags of `probe-links` ask for."""
    train_flags.settle_framework(args)
    cuda = train_flags.wants_cuda(args)
    from baechi_runtime.report.link_report import ProbeRequest

    return ProbeRequest(
        num_devices=train_flags.number_given(args) or train_flags.DEFAULT_DEVICES,
        cuda=cuda,
        split_gpu=args.split_gpu is not None,
        use_free_memory=args.use_free_memory,
        workers=args.workers,
        max_exponent=args.max_exponent,
        out=args.out,
        samples=args.samples,
        timeout_seconds=args.timeout,
        framework=args.framework,
        command=flags.command_of(args),
    )
