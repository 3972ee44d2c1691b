"""The flags of `baechi compare`, which are those of `train` with several methods, and the CompareRequest that they become."""

import argparse
import copy
from dataclasses import replace
from typing import TYPE_CHECKING

from baechi_ext.errors import OptionError
from baechi_ext.place.registry import METHODS
from baechi_runtime.cli.flags import train as train_flags
from baechi_runtime.cli.flags.kinds import Kind, OneOf, add_group, listed
from baechi_runtime.drivers.pipeline import MAPPED, SEARCHES
from baechi_runtime.host.as_main import require_script

if TYPE_CHECKING:
    from baechi_runtime.drivers.comparison import CompareRequest

DEFAULT = ("single", "m_topo", "m_etf", "m_sct", "auto")
_ONE_OF_MANY = {
    "initial_plan": SEARCHES,
    "device_map": MAPPED,
    "expert_file": ("expert",),
    "placeto_policy": ("placeto",),
    "placeto_episodes": ("placeto",),
    "traversal_order": tuple(name for name, method in METHODS.items() if method.ordered),
}
"""Flags that are for some methods alone."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """All flags of the sub-command."""
    train_flags.add_script(parser, "a training script, whose first training call is compared, instead of a built-in model")
    methods = f"which methods, with commas between them (default {','.join(DEFAULT)}): {', '.join(METHODS)}"
    add_group(parser, "comparing", {"placement_methods": (Kind(_methods, "NAMES"), methods, DEFAULT)})
    train_flags.add_shared_flags(parser, method=False)
    train_flags.add_batch_flags(parser)


def _methods(text: str) -> tuple[str, ...]:
    """Flag type: names of methods with commas between them."""
    return tuple(dict.fromkeys(map(OneOf(tuple(METHODS)), listed(text))))


def compare_request(args: argparse.Namespace) -> "CompareRequest":
    """The request the flags ask for. Raises OptionError where they contradict each other, or no method takes one."""
    train_flags.require_named_script(args, "compare")
    methods = args.placement_methods
    for flag, takers in _ONE_OF_MANY.items():
        if getattr(args, flag) and not set(takers) & set(methods):
            raise OptionError(f"--{flag} is only for {', '.join(takers)}, and none of these is compared; drop it, or add one of them")
    requests = {method: train_flags.train_request(_for(args, method)) for method in dict.fromkeys(("single", *methods))}
    if args.script is not None:
        train_flags.require_none_of(args, train_flags.OF_MODELS)
        train_flags.require_one_start(requests["single"].workers)
        require_script(args.script)
    from baechi_runtime.drivers.comparison import CompareRequest

    plans, auto = {method: request.plan for method, request in requests.items()}, requests.get(train_flags.AUTO)
    if auto is None and args.microbatches is not None:
        raise OptionError("--microbatches is for the plan of auto, which is not compared; add it to --placement_methods, or drop the flag")
    train = replace(requests["single"], microbatches=1 if auto is None else auto.microbatches)
    return CompareRequest(train, plans, args.script, tuple(args.script_args or ()))


def _for(args: argparse.Namespace, method: str) -> argparse.Namespace:
    """The flags as `train --placement_method=METHOD` takes them."""
    given = copy.copy(args)
    given.placement_method = method
    for flag, takers in _ONE_OF_MANY.items():
        if method not in takers:
            setattr(given, flag, 0 if flag == "placeto_episodes" else None)
    return given


COMPARE = (add_flags, compare_request)
