"""The choice between a plan and the framework's own engines, such as DistributedDataParallel: what is predicted to take least is run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from baechi_ext.ir import Cluster
from baechi_runtime.drivers.microbatches import is_near_least
from baechi_runtime.drivers.pipeline import LEAST_GAIN
from baechi_runtime.drivers.placement import Placement
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.report.report import Report
from baechi_runtime.report.tables import as_time

C = TypeVar("C", contravariant=True)


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine of the framework's own that can run the step."""

    name: str
    """As --sharding calls it."""
    title: str
    predicted_us: float | None
    """The predicted step; None where it can't be tried."""
    why_not: str = ""
    """Why it can't be tried."""


class Engines(Protocol[C]):
    """The engines that one run's devices have."""

    def predicted(self, whole: C, placement: Placement, cluster: Cluster) -> Sequence[Engine]:
        """All of them, with what a step of each is predicted to take. Raises ExecutionError."""

    def refusal(self, whole: C, engine: Engine) -> str:
        """Why the engine does not compute the same step, and which flag allows that; empty where it does."""

    def run(self, whole: C, engine: Engine, placement: Placement) -> Report:
        """The report of a run by the engine, checked first; `placement` is the plan that it is ahead of. Raises ParityError."""


def is_ranked(request: TrainRequest) -> bool:
    """True if the request leaves it to `auto` how worker processes of this machine run a built-in model's step."""
    asked = (request.cluster, request.link, request.cost_path, None if request.run is None else request.run.checkpoint)
    factors = request.comm_cost_factor, request.plan.cost_factor
    free = request.microbatches is None and request.plan.method == "auto" and not (request.sharding or request.plan.only_forward)
    kind = request.framework == "torch" and request.workers == "process" and not request.cuda
    return free and kind and asked == (None,) * 4 and factors == (1, 1) and not (request.costgen or request.log_device_placement)


def ranked(whole: C, placement: Placement, cluster: Cluster, engines: Engines[C]) -> tuple[Engine | None, Placement]:
    """The engine that is to run the step, None where that is the plan; and the plan, noting what each of the others is predicted to take.

    An engine has to be ahead by more than predictions are off, and to compute the same step. A plan that leaves nothing to look for is kept
    without any other being tried. Raises ExecutionError.
    """
    if is_near_least(placement, cluster):
        return None, placement
    own_us = placement.result.predicted_step_us
    chosen, notes = None, []
    for engine in sorted(engines.predicted(whole, placement, cluster), key=lambda e: e.predicted_us or 0.0):
        if engine.predicted_us is None:
            notes.append(f"{engine.title} was not tried: {engine.why_not}")
            continue
        takes = f"{engine.title} is predicted to take {as_time(engine.predicted_us)}"
        if chosen is None and engine.predicted_us < (1 - LEAST_GAIN) * own_us:
            why_not = engines.refusal(whole, engine)
            if not why_not:
                chosen, own = engine, f"the best plan of {placement.result.plan.method} {as_time(own_us)}"
                notes.append(f"{engine.title} runs the step: it is predicted to take {as_time(engine.predicted_us)}, {own}")
                continue
            takes += f", and is not chosen: {why_not}; --sharding={engine.name} runs it all the same"
        elif engine.predicted_us < own_us and chosen is None:
            takes += f", and is not chosen: that is not {LEAST_GAIN:.0%} ahead of {as_time(own_us)}, and predictions are off by as much"
        notes.append(takes)
    for note in notes:
        placement = placement.noting(note)
    return chosen, placement
