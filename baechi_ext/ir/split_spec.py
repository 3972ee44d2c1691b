"""torch.distributed.pipelining's `split_spec`, made from a plan that is a chain of modules: one stage a device, each begun by a module."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baechi_ext.errors import PlanError
from baechi_ext.ir.hints import module_names, modules_around
from baechi_ext.ir.op_graph import OpGraph

BEGINNING = "BEGINNING"
"""The name of the member of torch.distributed.pipelining.SplitPoint: a stage begins right before the module."""
_ADVICE = "--placement_method=contiguous on a model of layers comes near one, and --format=device_map takes any plan"


@dataclass(frozen=True, slots=True)
class Stage:
    """Forward ops that run one after the other on a device. `begins` is the module before which it begins; "" for the first stage."""

    device: int
    begins: str
    ops: tuple[int, ...]


def stages_of(graph: OpGraph, placement: Sequence[int]) -> list[Stage]:
    """The stages of a plan whose forward ops, in the order in which they were captured, go from device to device and never come back.

    Ops of no named module, as inputs and the loss, belong to the stage that they run in, the first ones to the first. Raises PlanError
    where the plan is no such chain, with the module at which it is none, or where all modules with which a stage would begin run again:
    torch cuts before each call. Raises GraphError for a graph whose ops don't know their modules.
    """
    module_names(graph)
    forward = [v for v, op in enumerate(graph.ops) if op.phase == "forward"]
    begun = _begun(graph, forward)
    named = [v for v in forward if graph.ops[v].module]
    stages: list[tuple[int, str, list[int]]] = [(placement[v], "", []) for v in (named or forward)[:1]]
    for v in forward:
        device = placement[v]
        if graph.ops[v].module and device != stages[-1][0]:
            begins = _begun_by(graph, v, begun, device)
            _require_new(graph, v, device, stages)
            stages.append((device, begins, []))
        stages[-1][2].append(v)
    return [Stage(device, begins, tuple(ops)) for device, begins, ops in stages]


def split_spec(stages: Sequence[Stage]) -> dict[str, str]:
    """Module -> name of its SplitPoint."""
    return {stage.begins: BEGINNING for stage in stages[1:]}


def _begun(graph: OpGraph, forward: Sequence[int]) -> dict[str, list[int]]:
    """The ops with which each module begins, one for each of its calls; of calls on end, for the first."""
    begun: dict[str, list[int]] = defaultdict(list)
    before: tuple[str, ...] = ()
    for v in forward:
        names = tuple(modules_around(graph.ops[v].module or ""))
        for name in names:
            if name not in before:
                begun[name].append(v)
        before = names
    return begun


def _begun_by(graph: OpGraph, v: int, begun: Mapping[str, Sequence[int]], device: int) -> str:
    """The outermost module that runs but once, and begins with this op."""
    module = graph.ops[v].module or ""
    found = [name for name in modules_around(module) if begun[name] == [v]]
    if not found:
        again = any(begun[name][0] == v for name in modules_around(module))
        why = "what begins there runs again, before which torch would cut, too" if again else "what runs before it there is on another"
        raise PlanError(
            f"the plan is not a chain of modules: op {graph.ops[v].id!r}, inside module {module!r}, is on device {device}, and {why}; "
            f"{_ADVICE}"
        )
    return min(found, key=len)


def _require_new(graph: OpGraph, v: int, device: int, stages: Sequence[tuple[int, str, list[int]]]) -> None:
    if any(device == earlier for earlier, _, _ in stages):
        raise PlanError(
            f"the plan is not a chain of modules: module {graph.ops[v].module!r} is on device {device} again, after "
            f"{stages[-1][1] or 'other modules'!r} on device {stages[-1][0]}; {_ADVICE}"
        )
