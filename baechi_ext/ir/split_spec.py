"""torch.distributed.pipelining's `split_spec`, made from a plan that is a chain of modules: one stage a device, each begun by a module."""

from collections.abc import Sequence
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
    where the plan is no such chain, with the module at which it is none; GraphError for a graph whose ops don't know their modules.
    """
    module_names(graph)
    forward = [v for v, op in enumerate(graph.ops) if op.phase == "forward"]
    first: dict[str, int] = {}
    for v in forward:
        for name in modules_around(graph.ops[v].module or ""):
            first.setdefault(name, v)
    named = [v for v in forward if graph.ops[v].module]
    stages: list[tuple[int, str, list[int]]] = [(placement[v], "", []) for v in (named or forward)[:1]]
    for v in forward:
        device = placement[v]
        if graph.ops[v].module and device != stages[-1][0]:
            begins = _begun_by(graph, v, first, device)
            _require_new(graph, v, device, stages)
            stages.append((device, begins, []))
        stages[-1][2].append(v)
    return [Stage(device, begins, tuple(ops)) for device, begins, ops in stages]


def split_spec(stages: Sequence[Stage]) -> dict[str, str]:
    """Module -> name of its SplitPoint."""
    return {stage.begins: BEGINNING for stage in stages[1:]}


def _begun_by(graph: OpGraph, v: int, first: dict[str, int], device: int) -> str:
    """The outermost module whose first op this is."""
    module = graph.ops[v].module or ""
    begun = [name for name in modules_around(module) if first[name] == v]
    if not begun:
        raise PlanError(
            f"the plan is not a chain of modules: op {graph.ops[v].id!r}, inside module {module!r}, is on device {device}, and what runs "
            f"before it there is on another; {_ADVICE}"
        )
    return min(begun, key=len)


def _require_new(graph: OpGraph, v: int, device: int, stages: Sequence[tuple[int, str, list[int]]]) -> None:
    if any(device == earlier for earlier, _, _ in stages):
        raise PlanError(
            f"the plan is not a chain of modules: module {graph.ops[v].module!r} is on device {device} again, after "
            f"{stages[-1][1] or 'other modules'!r} on device {stages[-1][0]}; {_ADVICE}"
        )
