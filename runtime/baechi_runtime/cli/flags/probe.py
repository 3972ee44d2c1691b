"""The flags of `baechi probe-links`, and the ProbeRequest they become. Reading them loads no framework."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from baechi_ext.errors import OptionError
from baechi_ext.ir.files import require_writable
from baechi_runtime.cli.flags import train as train_flags
from baechi_runtime.cli.flags.kinds import DEVICES, FILE, SWITCH, TIMEOUT, Flag, Kind, add_group, named, whole_number

if TYPE_CHECKING:
    from baechi_runtime.drivers.link_report import ProbeRequest

_DEVICES: dict[str, Flag] = {
    "num_devices": (DEVICES, f"CPU workers (default {train_flags.DEFAULT_DEVICES})"),
    "num_gpus": (DEVICES, "CUDA devices; --num_devices wins over it"),
    **train_flags.GPUS,
    "workers": (train_flags.WORKERS, "thread or process (default thread; TensorFlow: process)"),
    **train_flags.FRAMEWORK,
}
_EXPONENT = Kind(whole_number(3, 29, "from 3 to 29"), "E")
"""A line and its bend need a few sizes."""
_RUN: dict[str, Flag] = {
    "max_exponent": (_EXPONENT, "tensors of 2^0 to 2^E floats, or what memory allows (default 29)", 29),
    "timeout": (TIMEOUT, "for a device to answer (default 300)", 300.0),
    "out": (FILE, "write a cluster file, which --cluster reads"),
    "samples": (FILE, "keep every sample as JSON"),
    "json": (SWITCH, "print the report as JSON"),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `probe-links`."""
    add_group(parser, "devices", _DEVICES)
    add_group(parser, "run", _RUN)


def probe_request(args: argparse.Namespace) -> "ProbeRequest":
    """The request that the flags of `probe-links` ask for. Raises OptionError where they contradict each other, FileError for a file that
    can't be written."""
    if args.out is not None and args.samples is not None and Path(args.out).resolve() == Path(args.samples).resolve():
        raise OptionError(f"--out and --samples are both {args.out}; give each a file of its own")
    for path in (args.out, args.samples):
        if path is not None:
            require_writable(path)
    from baechi_runtime.drivers.link_report import ProbeRequest

    return ProbeRequest(**named(ProbeRequest, args) | train_flags.devices_of(args))


PROBE = (add_flags, probe_request)
