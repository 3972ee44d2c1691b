"""The flags of Baechi's train.py and of its placer (SoCC 2020): one table says of each what `baechi train` does with it."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from baechi_ext.errors import OptionError


@dataclass(frozen=True, slots=True)
class BaechiFlag:
    """A flag of Baechi's. `value` is one that it takes, or None for a switch; `instead` says why a refused flag is refused."""

    name: str
    value: str | None = None
    instead: str | None = None


TABLE: tuple[BaechiFlag, ...] = (
    BaechiFlag("model_name", "inception_v3"),
    BaechiFlag("batch_size", "32"),
    BaechiFlag("optimizer", "adam"),
    BaechiFlag("learning_rate", "0.01"),
    BaechiFlag("num_gpus", "4"),
    BaechiFlag("cost_path", "cost.pkl"),
    BaechiFlag("costgen"),
    BaechiFlag("only_forward"),
    BaechiFlag("colocate_grads_with_ops"),
    BaechiFlag("memory_fraction", "0.9"),
    BaechiFlag("comm_cost_coeffs", "0.0001754,134"),
    BaechiFlag("placement_method", "m_etf"),
    BaechiFlag("placer_type", "fusion"),
    BaechiFlag("grouper", "coplace"),
    BaechiFlag("sct_threshold", "0.1"),
    BaechiFlag("comm_cost_factor", "1.5"),
    BaechiFlag("cost_factor", "1.5"),
    BaechiFlag("placer_memory_fraction", "0.9"),
    BaechiFlag("only_important_ops"),
    BaechiFlag("consider_all_edges_in_grouping"),
    BaechiFlag("resolve_cycle"),
    BaechiFlag("fusion_check_disjoint_paths"),
    BaechiFlag("fusion_allow_cycle"),
    BaechiFlag("adjustment_method", "memory_sum"),
    BaechiFlag("adjustment_with_memory_limit"),
    BaechiFlag("data_format", "NCHW"),
    BaechiFlag("logdir", "runs"),
    BaechiFlag("log_device_placement"),
    BaechiFlag("log_placer_device_placement"),
    BaechiFlag("vocab_size", "5000"),
    BaechiFlag("max_seq_length", "30"),
    BaechiFlag("rnn_units", "1024"),
    BaechiFlag("num_layers", "2"),
    BaechiFlag("rnn_unit_type", "lstm"),
    BaechiFlag("encoder_type", "gnmt"),
    BaechiFlag("residual"),
    BaechiFlag("disable_nmt_colocation", None, "no layer of the built-in models is bound to another; drop it"),
    BaechiFlag("grappler", None, "choose a search with --placement_method"),
    BaechiFlag("grappler_time", "3600", "--time_limit=SECONDS bounds every search"),
    BaechiFlag("stats_path", "stats.log", "--cost_path=FILE reads costs that --costgen wrote, and --out=DIR keeps what a run finds"),
    BaechiFlag("device_info_path", "devices.json", "--cluster=FILE describes the devices"),
    BaechiFlag("log_colocation_graph", None, "--out=DIR writes graph.json, which gives every op's colocation group"),
)
SWITCHES = frozenset(flag.name for flag in TABLE if flag.value is None)
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


def revoked(argv: Sequence[str]) -> list[str]:
    """The names of Baechi's switches that a command line says no to."""
    words = [word.lower() for word in argv[: list(argv).index("--") if "--" in argv else None]]
    said = {f"--no{name}": name for name in SWITCHES} | {f"--{name}={no}": name for name in SWITCHES for no in _FALSE}
    return [said[word] for word in words if word in said]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Those of Baechi's flags that `baechi train` has for Baechi's sake alone; the refused ones are hidden from --help."""
    group = parser.add_argument_group("further flags of Baechi's")
    group.add_argument("--data_format", type=_data_format, default="NCHW", metavar="NCHW", help="how images are laid out")
    group.add_argument("--logdir", dest="out", metavar="DIR", help="the same as --out")
    group.add_argument(
        "--log_device_placement", "--log_placer_device_placement", action="store_true", help="say on stderr which op runs on which device"
    )
    for flag in TABLE:
        if flag.instead is not None:
            nargs = 0 if flag.value is None else "?"
            group.add_argument(f"--{flag.name}", action=_Refuse, nargs=nargs, help=argparse.SUPPRESS, instead=flag.instead)


class _Refuse(argparse.Action):
    def __init__(self, *, instead: str, **kwargs: Any) -> None:
        super().__init__(default=argparse.SUPPRESS, **kwargs)
        self.instead = instead

    def __call__(self, parser: object, namespace: object, values: object, option_string: str | None = None) -> NoReturn:
        raise OptionError(f"{option_string} is a flag of Baechi's that is not taken: {self.instead}")


def _data_format(text: str) -> str:
    if text != "NCHW":
        raise argparse.ArgumentTypeError(f"{text!r} is not how the built-in models take images; drop the flag or give NCHW")
    return text
