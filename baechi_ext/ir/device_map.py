"""accelerate's `device_map`, a dict from module names to devices: read as a placement of a graph's ops, and made from one.

A name covers what is below it, "" covers all, and of several the most specific counts. A name may also be a parameter's.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from baechi_ext.errors import FileError, GraphError
from baechi_ext.ir.expert import with_experts
from baechi_ext.ir.files import read_json
from baechi_ext.ir.op_graph import Op, OpGraph
from baechi_ext.ir.pins import modules_around, names_within, parameter_of

_OFFLOADED = ("cpu", "disk", "meta")
"""Where accelerate keeps parameters that are not on the device that uses them."""
_SHOWN = 5


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
            raise FileError(f"{self.source}: no device for parameter {_listed(left)}; name its module, or give all else a device with \"\"")
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
        if str(device).isdecimal() and int(device) < len(devices):
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
    _name(found, "", device_of, (below, parameters))
    return found


def _name(
    found: dict[str, int], module: str, device_of: Mapping[str, int], tree: tuple[Mapping[str, list[str]], Mapping[str, list[str]]]
) -> None:
    """Adds the module with all that is in it, or where that is on several devices its submodules and its own parameters."""
    below, parameters = tree
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
        _name(found, part, device_of, tree)


def module_names(graph: OpGraph) -> frozenset[str]:
    """All modules of the model that the graph knows of. Raises GraphError where it knows of none."""
    named = {name for op in graph.ops if op.module for name in modules_around(op.module)}
    if not named and all(op.module is None for op in graph.ops):
        raise GraphError("the graph's ops don't say which modules they come from; capture the model again (baechi train --out=DIR)")
    return frozenset(named.union(graph.modules))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:_SHOWN])) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
