"""The flags of `baechi train` that make it train on, and the RunOptions they become."""

import argparse
from typing import TYPE_CHECKING

from baechi_ext.errors import OptionError
from runtime.flags import common as flags

if TYPE_CHECKING:
    from runtime.training_run import RunOptions

CHECKPOINT_EVERY = 100


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training on", "With --train_steps the placed model is trained instead of timed.")
    group.add_argument("--train_steps", type=flags.at_least_one, metavar="N", help="train until step N, and print the losses")
    group.add_argument("--checkpoint", metavar="DIR", help="keep the last two checkpoints there")
    group.add_argument(
        "--checkpoint_every",
        type=flags.at_least_one,
        metavar="K",
        help=f"a checkpoint after every K steps, and after the last (default {CHECKPOINT_EVERY})",
    )
    group.add_argument("--resume", action="store_true", help="go on from the last checkpoint; from the start where there is none yet")


def options_of(args: argparse.Namespace) -> "RunOptions | None":
    """None without --train_steps. Raises OptionError where the flags contradict each other."""
    needs = {"--checkpoint": args.checkpoint is not None, "--checkpoint_every": args.checkpoint_every is not None, "--resume": args.resume}
    for flag, given in needs.items():
        if given and args.train_steps is None:
            raise OptionError(f"{flag} is for a training; give --train_steps=N as well")
        if given and args.checkpoint is None:
            raise OptionError(f"{flag} needs a folder; give --checkpoint=DIR as well")
    if args.train_steps is None:
        return None
    if args.costgen:
        raise OptionError("--costgen only profiles and --train_steps trains; give one of them")
    from runtime.training_run import RunOptions

    every = args.checkpoint_every or CHECKPOINT_EVERY
    return RunOptions(args.train_steps, args.checkpoint, every, args.resume, flags.command_of(args))
