"""A module's training call, planned before it runs, and the module placed by a plan that is there already: `baechi_ext.plan`."""

from dataclasses import replace
from functools import reduce
from typing import Any, TypeVar

from torch import nn

from baechi_ext.cost import attach_costs
from baechi_ext.errors import CaptureError, MismatchError, OptionError
from baechi_ext.ir import OpGraph
from baechi_runtime.drivers.placement import Placement
from baechi_runtime.host.generators import python_generators_kept
from baechi_runtime.torch.calls.module_call import call_of, place_in, take_out
from baechi_runtime.torch.calls.parallelize import ParallelizeOptions, arguments_of, placed

M = TypeVar("M", bound=nn.Module)


def plan_call(module: nn.Module, example_inputs: Any, options: ParallelizeOptions) -> tuple[OpGraph, Placement]:
    """The graph of the module's call with these inputs, with the costs of devices side by side, and its plan. Forward runs twice for that;
    buffers and random generators are put back, and the module is left as it was.

    Raises CaptureError where the call can't be placed, OptionError for a module that is placed, and what placing raises.
    """
    if call_of(module) is not None:
        raise OptionError("the module is placed already; call baechi_ext.unplace(model) first")
    with python_generators_kept():
        calls = place_in(module, replace(options.settings(), verify_steps=0, strict=True, keep_placed=True))
        try:
            calls.prepare(*arguments_of(example_inputs))
            first, *others = calls.session.groups
        finally:
            take_out(module)
    pieces = f"graph breaks leave {len(others) + 1} pieces that nothing ties together, and this is the plan of the first" if others else ""
    placement = reduce(Placement.noting, filter(None, (first.note, pieces)), first.placement)
    if placement.profile is None:
        raise CaptureError(f"{type(module).__name__} is planned in one process; start it without torchrun")
    several = len(placement.result.plan.cluster) > 1
    return attach_costs(placement.graph, placement.profile, contended=several), placement


def apply_plan(module: M, example_inputs: Any, options: ParallelizeOptions, plan: Placement) -> M:
    """The module, whose calls run by the plan from now on, as `parallelize` has them run.

    Raises MismatchError where its call with these inputs has other ops than the plan, and what `parallelize` raises.
    """
    placed(module, example_inputs, options, plan)
    call = call_of(module)
    groups = [] if call is None else call.session.groups
    if groups and groups[0].placement is not plan:
        take_out(module)
        raise MismatchError(
            f"the call of {type(module).__name__} has other ops than the plan, which is of an earlier state of it; plan it again"
        )
    return module
