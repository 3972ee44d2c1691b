"""Pins: the devices that a person fixed for some ops, by module, parameter, op or colocation group."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import translate

from baechi_ext.errors import OptionError
from baechi_ext.ir.op_graph import Op, OpGraph


@dataclass(frozen=True, slots=True)
class Pin:
    """`pattern` may hold *, ? and [...]; `device` is an index, or a device's name."""

    pattern: str
    device: str

    @classmethod
    def parse(cls, text: str) -> "Pin":
        """The pin that `PATTERN=DEVICE` writes. Raises OptionError for what is none."""
        pattern, equals, device = text.rpartition("=")
        if not (pattern and equals and device):
            raise OptionError(f"{text!r} is no pin; write PATTERN=DEVICE, such as 'encoder.*=0'")
        return cls(pattern, device)

    def __str__(self) -> str:
        return f"{self.pattern}={self.device}"

    def index(self, devices: Sequence[str]) -> int:
        """The device's position among `devices`, their names. Raises OptionError where there is none."""
        if self.device in devices:
            return devices.index(self.device)
        if self.device.isdecimal() and int(self.device) < len(devices):
            return int(self.device)
        raise OptionError(f"the pin {str(self)!r} names no device; there are 0 to {len(devices) - 1}: {', '.join(devices)}")


def with_pins(graph: OpGraph, pins: Sequence[Pin], devices: Sequence[str]) -> OpGraph:
    """The graph with these pins beside its own; what shares a colocation group with a pinned op is pinned with it.

    A pattern is compared with an op's id and colocation string, with the name of its module and of those around that, and with the
    name of the parameter that it updates; where none of these is called so, with modules inside of ops that are whole modules.

    Raises OptionError for a pin that matches nothing, one whose device is none of `devices` (names), and for two that want a group,
    or an op, on different devices.
    """
    chosen: dict[int | str, tuple[int, str]] = {}
    for v, device in graph.pins.items():
        if not 0 <= device < len(devices):
            raise OptionError(f"the graph pins op {graph.ops[v].id!r} to device {device}; there are 0 to {len(devices) - 1}")
        _choose(chosen, graph.ops[v], v, (device, f"the graph's pin of op {graph.ops[v].id!r} to device {device}"))
    for pin in pins:
        device, found = pin.index(devices), ops_called(graph, pin.pattern)
        if not found:
            raise OptionError(f"the pin {str(pin)!r} matches nothing: {not_called(graph)}")
        for v in found:
            _choose(chosen, graph.ops[v], v, (device, f"the pin {str(pin)!r}"))
    if not chosen:
        return graph
    devices_of = [chosen.get(_key(op, v), (None, ""))[0] for v, op in enumerate(graph.ops)]
    return graph.replace_ops([replace(op, pin=device) for op, device in zip(graph.ops, devices_of, strict=True)])


def ops_called(graph: OpGraph, pattern: str) -> list[int]:
    """The positions of the ops that a pattern, as of a pin, is for (see `with_pins`)."""
    matches = re.compile(translate(pattern)).match
    found = [v for v, op in enumerate(graph.ops) if any(map(matches, names_of(op)))]
    return found or [v for v, op in enumerate(graph.ops) if any(map(matches, names_within(op, graph)))]


def not_called(graph: OpGraph) -> str:
    """What to say of a pattern that matches nothing, with some names that would."""
    return f"no module, parameter, op or colocation group of the graph is called so; {_some_names(graph)}"


def with_pins_of_groups(graph: OpGraph) -> OpGraph:
    """The graph with all ops of a colocation group pinned where its first pinned op is."""
    if not graph.pins:
        return graph
    first: dict[int | str, int] = {}
    for v, device in graph.pins.items():
        first.setdefault(_key(graph.ops[v], v), device)
    return graph.replace_ops([replace(op, pin=first.get(_key(op, v))) for v, op in enumerate(graph.ops)])


def names_of(op: Op) -> Iterator[str]:
    """What a person may call the op by."""
    yield op.id
    if op.colocation is not None:
        yield op.colocation
    if (parameter := parameter_of(op)) is not None:
        yield parameter
    yield from modules_around(op.module or "")


def names_within(op: Op, graph: OpGraph) -> Iterator[str]:
    """The modules inside an op that is a whole module, called by its colocation string; none for other ops."""
    if op.module and op.module == op.colocation:
        yield from (name for name in graph.modules if name.startswith(f"{op.module}."))


def modules_around(module: str) -> Iterator[str]:
    """The module's name and those of the modules that hold it, the innermost first; the model itself, "", is left out."""
    while module:
        yield module
        module = module.rpartition(".")[0]


def parameter_of(op: Op) -> str | None:
    """The name in the model of the parameter that an op updates, or whose gradient it hands over; None for other ops."""
    if op.module is None or (op.phase != "update" and op.op != "gradient"):
        return None
    return f"{op.module}.{op.id.rpartition('.')[2]}".removeprefix(".")


def _key(op: Op, v: int) -> int | str:
    return v if op.colocation is None else op.colocation


def _choose(chosen: dict[int | str, tuple[int, str]], op: Op, v: int, wish: tuple[int, str]) -> None:
    before = chosen.setdefault(_key(op, v), wish)
    if before[0] != wish[0]:
        what = f"op {op.id!r}" if op.colocation is None else f"colocation group {op.colocation!r}, which shares a device"
        raise OptionError(f"{before[1]} and {wish[1]} contradict each other: both are for {what}; drop one of them")


def _some_names(graph: OpGraph, most: int = 6) -> str:
    modules = dict.fromkeys(name for op in graph.ops if op.module for name in modules_around(op.module) if "." not in name)
    if modules:
        return f"its modules are {', '.join(list(modules)[:most])}{' and more' if len(modules) > most else ''}"
    return f"its first ops are {', '.join(op.id for op in graph.ops[:most])}"
