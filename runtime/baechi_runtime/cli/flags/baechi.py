"""The flags of Baechi's train.py and of its placer (SoCC 2020) that `baechi train` spells, or has, for Baechi's sake alone; the others are
among its own."""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from baechi_ext.errors import OptionError
from baechi_runtime.cli.flags.kinds import Flag, Kind, add_group

REFUSED = {
    "disable_nmt_colocation": "no layer of the built-in models is bound to another; drop it",
    "grappler": "choose a search with --placement_method",
    "grappler_time": "--time_limit=SECONDS bounds every search",
    "stats_path": "--cost_path=FILE reads costs that --costgen wrote, and --out=DIR keeps what a run finds",
    "device_info_path": "--cluster=FILE describes the devices",
    "log_colocation_graph": "--out=DIR writes graph.json, which gives every op's colocation group",
}
"""Flags that are not taken, and what to do instead."""
SWITCHES = frozenset(
    (
        *("costgen", "only_forward", "colocate_grads_with_ops", "log_device_placement", "log_placer_device_placement", "residual"),
        *("only_important_ops", "consider_all_edges_in_grouping", "resolve_cycle", "fusion_check_disjoint_paths", "fusion_allow_cycle"),
        *("adjustment_with_memory_limit", "disable_nmt_colocation", "grappler", "log_colocation_graph"),
    )
)
"""Those without a value, which TensorFlow spells in several ways."""
_TRUE, _FALSE = ("true", "t", "1"), ("false", "f", "0")


def with_plain_switches(argv: Sequence[str]) -> list[str]:
    """`argv` with Baechi's switches as argparse takes them: --costgen=True is --costgen; --costgen=False and --nocostgen revoke it.

    What follows a lone -- stays. Raises OptionError for another value.
    """
    end = list(argv).index("--") if "--" in argv else len(argv)
    revoked = {f"--no{name}": f"--{name}" for name in SWITCHES}
    plain: list[str] = []
    for argument in argv[:end]:
        flag, equals, value = argument.partition("=")
        if equals and flag in revoked.values():
            if value.lower() not in _TRUE + _FALSE:
                raise OptionError(f"{argument} is neither True nor False")
            plain = [a for a in plain if a != flag] + [flag] * (value.lower() in _TRUE)
        elif argument in revoked:
            plain = [a for a in plain if a != revoked[argument]]
        else:
            plain.append(argument)
    return plain + list(argv[end:])


def _data_format(text: str) -> str:
    if text != "NCHW":
        raise argparse.ArgumentTypeError(f"{text!r} is not how the built-in models take images; drop the flag or give NCHW")
    return text


_FORMAT: dict[str, Flag] = {"data_format": (Kind(_data_format, "NCHW"), "how images are laid out", "NCHW")}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Those of Baechi's flags that `baechi train` has for Baechi's sake alone; the refused ones are hidden from --help."""
    group = add_group(parser, "further flags of Baechi's", _FORMAT)
    group.add_argument("--logdir", dest="out", metavar="DIR", help="the same as --out")
    group.add_argument(
        "--log_device_placement", "--log_placer_device_placement", action="store_true", help="say on stderr which op runs on which device"
    )
    for name, instead in REFUSED.items():
        nargs = 0 if name in SWITCHES else "?"
        group.add_argument(f"--{name}", action=_Refuse, nargs=nargs, help=argparse.SUPPRESS, instead=instead)


class _Refuse(argparse.Action):
    def __init__(self, *, instead: str, **kwargs: Any) -> None:
        super().__init__(default=argparse.SUPPRESS, **kwargs)
        self.instead = instead

    def __call__(self, parser: object, namespace: object, values: object, option_string: str | None = None) -> NoReturn:
        raise OptionError(f"{option_string} is a flag of Baechi's that is not taken: {self.instead}")
