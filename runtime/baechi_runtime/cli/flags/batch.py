"""The flags that say how a step's batch may be split: --microbatches and --batch_norm."""

import argparse

from baechi_ext.errors import OptionError
from baechi_runtime.cli.flags import common as flags

AUTO = "auto"
WHOLE, PER_PART = "whole", "per_part"
_OF_ONE_STEP = ("cost_path", "initial_plan", "device_map", "expert_file", "pin", "grouper", "placer_type")
"""Flags whose files and names are of the step with its whole batch."""


def set_defaults(parser: argparse.ArgumentParser) -> None:
    """A whole batch, where the flags are not asked for."""
    parser.set_defaults(microbatches=1, batch_norm=WHOLE)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """--microbatches and --batch_norm."""
    group = parser.add_argument_group("batch")
    group.add_argument(
        "--microbatches",
        type=_microbatches,
        default=None,
        metavar="N",
        help="the parts that a batch is split into, each with ops of its own that are placed: auto (one for each device, where that is "
        "faster), a number, or sizes, as 3,1 (default: auto where --placement_method=auto may choose freely, else 1)",
    )
    group.add_argument(
        "--batch_norm",
        type=flags.one_of(dict.fromkeys((WHOLE, PER_PART))),
        default=WHOLE,
        metavar="NAME",
        help="whole: a batch that BatchNorm normalises over is not split; per_part: each part may be normalised by itself, as "
        "DistributedDataParallel does it (default %(default)s)",
    )


def _microbatches(text: str) -> int | tuple[int, ...] | str:
    """Flag type: auto, a number of parts, or their sizes."""
    if text == AUTO:
        return AUTO
    sizes = tuple(flags.at_least_one(part) for part in text.split(","))
    return sizes[0] if len(sizes) == 1 else sizes


def microbatches_of(args: argparse.Namespace, *, splits: bool) -> tuple[int, ...] | int | None:
    """TrainRequest.microbatches. `splits`: what is run can be split. Raises OptionError where it can't, and parts are asked for."""
    given: int | tuple[int, ...] | str | None = args.microbatches
    if given not in (None, 1) and not splits:
        raise OptionError("--microbatches is for a built-in model of PyTorch that is placed; drop it")
    others = [name for name in _OF_ONE_STEP if getattr(args, name, None)]
    if given == AUTO and others:
        raise OptionError(f"--microbatches=auto and --{others[0]} exclude each other: the latter is of one way to split a batch; drop one")
    if given not in (None, 1) and args.cost_path is not None:
        raise OptionError("--cost_path has the costs of a step with its whole batch; drop it, or give --microbatches=1")
    if isinstance(given, str):
        return None
    if given is None:
        return None if splits and args.placement_method == AUTO and not others else 1
    return given
