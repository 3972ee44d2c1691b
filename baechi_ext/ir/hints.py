"""Devices that a person chose for some ops, by module, parameter, op or colocation group: pins, which every plan keeps to; and hints, in a
file of names or in accelerate's `device_map`, and how all other ops follow those.

A device map, a dict from module names to devices, is read as a placement of a graph's ops, and made from one. A name in it covers what is
below it, "" covers all, and of several the most specific counts. A name may also be a parameter's.
"""

import heapq
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import translate
from functools import partial
from pathlib import Path
from typing import TypeVar

from baechi_ext.errors import FileError, GraphError, OptionError
from baechi_ext.ir.files import read_json
from baechi_ext.ir.op_graph import Op, OpGraph
from baechi_ext.ir.plan import Plan

P = TypeVar("P", bound=Plan)
_OFFLOADED = ("cpu", "disk", "meta")  # where accelerate keeps parameters that are not on the device that uses them
_SHOWN = 5
MOST_OF_A_PATTERN = 1000
"""Characters; what fnmatch makes of a pattern takes the square of its length."""
_DIGITS = 10  # an index has fewer


@dataclass(frozen=True, slots=True)
class Pin:
    """`pattern` may hold *, ? and [...]; `device` is an index, or a device's name."""

    pattern: str
    device: str

    @classmethod
    def parse(cls, text: str) -> "Pin":
        """The pin that `PATTERN=DEVICE` writes. Raises OptionError for what is none."""
        pattern, equals, device = str(text).rpartition("=")
        if not (pattern and equals and device):
            raise OptionError(f"{text!r} is not a pin; write PATTERN=DEVICE, such as 'encoder.*=0'")
        if len(pattern) > MOST_OF_A_PATTERN:
            raise OptionError(f"the pattern {pattern!r} has {len(pattern)} characters; the limit is {MOST_OF_A_PATTERN}")
        return cls(pattern, device)

    def __str__(self) -> str:
        return f"{self.pattern}={self.device}"

    def index(self, devices: Sequence[str]) -> int:
        """The device's position among `devices`, their names. Raises OptionError where there is none."""
        if self.device in devices:
            return devices.index(self.device)
        if self.device.isdecimal() and len(self.device) < _DIGITS and int(self.device) < len(devices):
            return int(self.device)
        raise OptionError(f"the pin {str(self)!r} names no device; there are 0 to {len(devices) - 1}: {', '.join(devices)}")


def with_pins(graph: OpGraph, pins: Sequence[Pin], devices: Sequence[str]) -> OpGraph:
    """The graph with these pins beside its own; what shares a colocation group with a pinned op is pinned with it.

    A pattern is compared with an op's id and colocation string, with the name of its module and of those around that, and with the
    name of the parameter that it updates; where none of these is called so, with modules inside of ops that are whole modules. What is
    called exactly so counts first: a name may hold [, ] or * itself.

    Raises OptionError for a pin that matches nothing, one whose device is none of `devices` (names), and for two that want a group,
    or an op, on different devices.
    """
    chosen: dict[int | str, tuple[int, str]] = {}
    for v, device in graph.pins.items():
        if not 0 <= device < len(devices):
            there = f"there are 0 to {len(devices) - 1}; give more (--num_devices), or change the graph's pin"
            raise OptionError(f"the graph pins op {graph.ops[v].id!r} to device {device}; {there}")
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


def as_pinned(plan: P) -> P:
    """The plan whose graph has the pins that the plan was made with (its option `pins`), which are in no graph file. As it is where it does
    not keep to them: those of another program, or of other devices than it is on now."""
    given = plan.options.get("pins")
    try:
        pins = [Pin.parse(text) for text in given] if isinstance(given, list) else []
        pinned = with_pins(plan.graph, pins, [device.name for device in plan.cluster.devices]) if pins else plan.graph
    except OptionError:
        return plan
    return replace(plan, graph=pinned) if pinned.pinned(plan.placement) == plan.placement else plan


def ops_called(graph: OpGraph, pattern: str) -> list[int]:
    """The positions of the ops that a pattern, as of a pin, is for (see `with_pins`)."""
    ways: tuple[Callable[[str], object], ...] = (pattern.__eq__, re.compile(translate(pattern)).match)
    for is_called in ways:
        for names in (names_of, partial(names_within, graph=graph)):
            found = [v for v, op in enumerate(graph.ops) if any(map(is_called, names(op)))]
            if found:
                return found
    return []


def not_called(graph: OpGraph) -> str:
    """The message for a pattern that matches nothing, with some names that would."""
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
    """Names that a person may call the op by."""
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


def require_hints(graph: OpGraph) -> None:
    """Raises OptionError for a graph without any hint."""
    if len(graph) and all(op.expert is None for op in graph.ops):
        raise OptionError(
            "the graph has no expert hints; give some with --expert_file=FILE, take a model that has them (gnmt_v2, wide_towers), or "
            "choose another --placement_method"
        )


def with_experts(graph: OpGraph, hints: Sequence[int | None]) -> OpGraph:
    """The graph with these hints and those that follow from them.

    A colocation group takes the most frequent hint of its ops, of equals the first. An op without one takes the hint of its
    forward op, else of the last op it reads from, else of the first op that reads from it. Only ops that no path connects with a
    hint are left without.
    """
    found = list(hints)
    for group in graph.groups.values():
        chosen = Counter(found[v] for v in group if found[v] is not None).most_common(1)
        for v in group:
            found[v] = chosen[0][0] if chosen else None
    _Following(graph, found).run()
    return graph.replace_ops([replace(op, expert=hint) for op, hint in zip(graph.ops, found, strict=True)])


def _is_pattern(name: str) -> bool:
    return any(c in name for c in "*?[")


class _Following:
    """Hints that spread in sweeps: forward, to ops without one from their forward ops and what they read, and back, from their readers.

    A sweep visits, in its order, only ops that then find a hint: each waits from when the first of those that it follows has one.
    """

    def __init__(self, graph: OpGraph, found: list[int | None]) -> None:
        self.graph, self.found = graph, found
        self.rank = [0] * len(graph)
        for i, v in enumerate(graph.order):
            self.rank[v] = i
        self.forward = [None if op.forward_op is None else graph.index.get(op.forward_op) for op in graph.ops]
        self.behind: dict[int, list[int]] = defaultdict(list)
        """Ops by their forward op."""
        for v, f in enumerate(self.forward):
            if f is not None:
                self.behind[f].append(v)
        self.waiting: dict[int, list[int]] = {1: [], -1: []}
        """By direction, the turns of ops that will find a hint in the next sweep; a turn is the op's rank times the direction."""
        self.direction, self.turn = 0, 0
        self.queue: list[int] = []
        """The turns that are left of the sweep under way, a heap."""

    def run(self) -> None:
        for v, hint in enumerate(self.found):
            if hint is not None:
                self._tell(v)
        while any(self.waiting.values()):
            for direction in (1, -1):
                self._sweep(direction)

    def _sweep(self, direction: int) -> None:
        self.direction, self.queue, self.waiting[direction] = direction, self.waiting[direction], []
        heapq.heapify(self.queue)
        while self.queue:
            self.turn = heapq.heappop(self.queue)
            v = self.graph.order[self.turn * direction]
            if self.found[v] is None:
                hint = next(self.found[w] for w in self._leaders(v) if self.found[w] is not None)
                label = self.graph.ops[v].colocation
                whole = (v,) if label is None else self.graph.groups[label]
                for w in whole:
                    self.found[w] = hint
                for w in whole:
                    self._tell(w)

    def _tell(self, v: int) -> None:
        """Op v has a hint now: those that follow it wait for their turns, in the sweep under way if they have not had them."""
        for direction, followers in ((1, (*self.graph.successors[v], *self.behind[v])), (-1, self.graph.predecessors[v])):
            for w in followers:
                turn = self.rank[w] * direction
                if self.found[w] is None and direction == self.direction and turn > self.turn:
                    heapq.heappush(self.queue, turn)
                elif self.found[w] is None:
                    self.waiting[direction].append(turn)

    def _leaders(self, v: int) -> list[int]:
        """The ops whose hints it takes, the first that has one."""
        if self.direction < 0:
            return sorted(self.graph.successors[v], key=self.rank.__getitem__)
        before = sorted(self.graph.predecessors[v], key=self.rank.__getitem__, reverse=True)
        forward = self.forward[v]
        return before if forward is None else [forward, *before]


@dataclass(frozen=True, slots=True)
class ExpertFile:
    """A file of hints, read but not yet put onto a graph: names -> device indices.

    A name is an op's id or its colocation string, or a pattern of such with *, ? and [...].
    """

    path: str
    rules: Mapping[str, int]

    @classmethod
    def load(cls, path: str | Path) -> "ExpertFile":
        """Raises FileError for what is no JSON object of device indices."""
        rules = read_json(path, "expert")
        rules.pop("schema_version", None)
        for name, device in rules.items():
            if isinstance(device, bool) or not isinstance(device, int):
                raise FileError(f"{path}: the device of {name!r} is {device!r}; expected its index, a whole number")
            if len(name) > MOST_OF_A_PATTERN and _is_pattern(name):
                raise FileError(f"{path}: the pattern {name!r} has {len(name)} characters; the limit is {MOST_OF_A_PATTERN}")
        return cls(str(path), rules)

    def apply(self, graph: OpGraph) -> OpGraph:
        """The graph with these hints in place of its own. An op's exact names count first (its id before its colocation string),
        then the patterns in the file's order. Raises FileError for a name that nothing in the graph has.
        """
        patterns = {name: re.compile(translate(name)) for name in self.rules if _is_pattern(name)}
        unused = dict.fromkeys(self.rules)
        hints: list[int | None] = []
        for op in graph.ops:
            own = [name for name in (op.id, op.colocation) if name is not None]
            matching = [name for name in own if name in self.rules]
            matching += [name for name, pattern in patterns.items() if any(map(pattern.match, own))]
            hints.append(self.rules[matching[0]] if matching else None)
            for name in matching:
                unused.pop(name, None)
        if unused:
            shown = ", ".join(map(repr, list(unused)[:5]))
            raise FileError(f"{self.path}: no op and no colocation group of the graph is called {shown}; take names from the graph file")
        return with_experts(graph, hints)


@dataclass(frozen=True, slots=True)
class DeviceMap:
    """A device map, read but not yet put onto a graph. `source` names it in messages."""

    source: str
    devices: Mapping[str, int | str]

    @classmethod
    def load(cls, path: str | Path) -> "DeviceMap":
        """Raises FileError for what is no JSON object of device indices or names."""
        devices = read_json(path, "device map")
        devices.pop("schema_version", None)
        for name, device in devices.items():
            if isinstance(device, bool) or not isinstance(device, (int, str)):
                raise FileError(f"{path}: the device of {name!r} is {device!r}; expected its index or its name")
        return cls(str(path), devices)

    def hints(self, graph: OpGraph, devices: Sequence[str]) -> list[int | None]:
        """For each op the index of its device; None for those whose module, if they have one, the map does not name.

        `devices` are names. Raises FileError for a name that the model does not have, a device that is none of these, and a
        parameter that is left without a device; GraphError for a graph whose ops don't know their modules.
        """
        known = module_names(graph)
        parameters = {name: v for v, op in enumerate(graph.ops) if (name := parameter_of(op)) is not None}
        unknown = [name for name in self.devices if name and name not in known and name not in parameters]
        if unknown:
            tops = sorted({name for name in known if "." not in name})
            raise FileError(
                f"{self.source}: the model has no module or parameter {_listed(unknown)}; "
                f"its modules are {_listed(tops)} and what is in them"
            )
        index = {name: self._index(name, devices) for name in self.devices}
        hints = [self._hint(op, graph, index) for op in graph.ops]
        for name, v in parameters.items():
            if name in index:
                group = graph.ops[v].colocation
                for w in (v,) if group is None else graph.groups[group]:
                    hints[w] = index[name]
        left = [name for name, v in parameters.items() if hints[v] is None]
        if left:
            raise FileError(f'{self.source}: no device for parameter {_listed(left)}; name its module, or give all else a device with ""')
        return hints

    def apply(self, graph: OpGraph, devices: Sequence[str]) -> OpGraph:
        """The graph with the map's devices, and those that follow from them, for hints in place of its own. Raises as `hints` does."""
        return with_experts(graph, self.hints(graph, devices))

    def _hint(self, op: Op, graph: OpGraph, index: Mapping[str, int]) -> int | None:
        """The device of an op; that of most names inside, where it is a whole module and is taken apart by the map."""
        if op.module is None:
            return None
        inside = Counter(index[name] for name in names_within(op, graph) if name in index)
        if inside:
            return inside.most_common(1)[0][0]
        return next((index[name] for name in (*modules_around(op.module), "") if name in index), None)

    def _index(self, name: str, devices: Sequence[str]) -> int:
        device = self.devices[name]
        if device in devices:
            return devices.index(device)
        if str(device).isdecimal() and len(str(device)) < _DIGITS and int(device) < len(devices):
            return int(device)
        what = f"{self.source}: {name!r} goes to {device!r}, and"
        if device in _OFFLOADED:
            raise FileError(
                f"{what} accelerate fetches such parameters to another device when they are needed; here all have a device of their "
                f"own: give it one of 0 to {len(devices) - 1}"
            )
        raise FileError(f"{what} there are only the devices 0 to {len(devices) - 1}: {', '.join(devices)}")


def nearest_map(graph: OpGraph, placement: Sequence[int]) -> dict[str, int]:
    """The device map that keeps most of a placement: the fewest names, no two of which cover the same parameter.

    A module goes to the device that has most of its ops, each counted by its shares of the graph's persistent bytes and of its
    time. What its code does between its submodules has no name where these are on several devices.
    Raises GraphError for a graph whose ops don't know their modules.
    """
    module_names(graph)
    total_bytes = sum(op.persistent_bytes for op in graph.ops) or 1
    total_us = graph.total_compute_us() or 1
    weights: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    parameters: dict[str, list[str]] = defaultdict(list)
    for op, d in zip(graph.ops, placement, strict=True):
        if op.module is not None:
            weights[op.module][d] += op.persistent_bytes / total_bytes + op.compute_us / total_us
            if (name := parameter_of(op)) is not None:
                parameters[op.module].append(name)
    device_of = {module: max(sorted(on), key=on.__getitem__) for module, on in weights.items()}
    below: dict[str, list[str]] = defaultdict(list)
    for name in dict.fromkeys(name for module in device_of for name in modules_around(module)):
        below[name.rpartition(".")[0]].append(name)
    found: dict[str, int] = {}
    _name(found, "", device_of, below, parameters)
    return found


def _name(
    found: dict[str, int], module: str, device_of: Mapping[str, int], below: Mapping[str, list[str]], parameters: Mapping[str, list[str]]
) -> None:
    """Adds the module with all that is in it, or where that is on several devices its submodules and its own parameters."""
    inside, pending = set(), [module]
    while pending:
        part = pending.pop()
        inside |= {device_of[part]} if part in device_of and (part in parameters or part not in below) else set()
        pending += below.get(part, ())
    if len(inside) == 1:
        found[module] = inside.pop()
        return
    found |= dict.fromkeys(parameters.get(module, ()), device_of.get(module, 0))
    for part in below.get(module, ()):
        _name(found, part, device_of, below, parameters)


def module_names(graph: OpGraph) -> frozenset[str]:
    """All modules of the model that the graph knows of. Raises GraphError where it knows of none."""
    named = {name for op in graph.ops if op.module for name in modules_around(op.module)}
    if not named and all(op.module is None for op in graph.ops):
        raise GraphError("the graph's ops don't say which modules they come from; capture the model again (baechi train --out=DIR)")
    return frozenset(named.union(graph.modules))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:_SHOWN])) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
