"""The choice between a plan and the framework's own engines, such as DistributedDataParallel: what is predicted to take least is run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from baechi_ext.ir import Cluster
from baechi_runtime.drivers.pipeline import LEAST_GAIN
from baechi_runtime.drivers.placement import Placement, is_near_least
from baechi_runtime.measure.parity_result import Parity
from baechi_runtime.report.findings import Findings
from baechi_runtime.report.report import REPLICAS
from baechi_runtime.report.tables import as_time

C = TypeVar("C", contravariant=True)
L = TypeVar("L", covariant=True)
IN_REACH = 1.5
"""An engine that takes so many times what the plan is predicted to take is not compared with it; predictions are not so far off."""


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

    @property
    def flag(self) -> str:
        """The flag by which `train` runs the same. None of a sharding: --sharding searches for one by measured costs, too, and runs none
        that differs from the step that is not split."""
        return f"--sharding={self.name}" if self.name in REPLICAS else ""


class Engines(Protocol[C, L]):
    """The engines that one run's devices have."""

    def predicted(self, whole: C, placement: Placement, cluster: Cluster, enough_us: float) -> Sequence[Engine]:
        """All of them, with what a step of each is predicted to take, by real steps of it; roughly, if that is more than `enough_us`.
        Raises ExecutionError."""

    def refusal(self, whole: C, engine: Engine) -> str:
        """Why the engine does not compute the same step, and which flag allows that; empty where it does."""

    def check(self, whole: C, engine: Engine) -> Parity:
        """The parity of one step of the engine with the unplaced one."""

    def load(self, whole: C, engine: Engine) -> L:
        """The engine's step, to be timed beside others. Raises ExecutionError."""

    def run(self, whole: C, engine: Engine, placement: Placement) -> Findings:
        """The report of a run by the engine, checked first; `placement` is the plan that it is ahead of. Raises ParityError."""


def ranked(
    whole: C, placement: Placement, cluster: Cluster, engines: Engines[C, Any], rehearse: Callable[[Placement], Placement]
) -> tuple[Engine | None, Placement]:
    """The engine that is to run the step, None where that is the plan; and the plan, noting what each of the others is predicted to take.

    An engine has to compute the same step as `whole`. One that could be ahead is compared with the plan by real steps of both (`rehearse`
    gives the plan with `rehearsed_us`), since a plan's prediction can be further off than the two are apart. A plan that leaves nothing to
    look for is kept without any other being tried. Raises ExecutionError.
    """
    if is_near_least(placement, cluster):
        return None, placement
    method, own_us, own_notes = placement.result.plan.method, placement.result.predicted_step_us, placement.result.notes
    own, rehearsed, chosen = f"the plan of {method} {as_time(own_us)}", False, None
    for engine in sorted(engines.predicted(whole, placement, cluster, own_us * IN_REACH), key=lambda e: e.predicted_us or 0.0):
        if engine.predicted_us is None:
            placement = placement.noting(f"{engine.title} was not tried: {engine.why_not}")
            continue
        takes, why_not = f"{engine.title} is predicted to take {as_time(engine.predicted_us)}", ""
        in_reach = not rehearsed and engine.predicted_us < own_us * IN_REACH
        if in_reach and (why_not := engines.refusal(whole, engine)):
            takes += f", and is not chosen: {why_not}" + (f"; {engine.flag} runs it all the same" if engine.flag else "")
        elif in_reach:
            placement, rehearsed = rehearse(placement), True
            own_us = placement.rehearsed_us or own_us
            own += f", of which a few steps took {as_time(own_us)}"
            if engine.predicted_us < (1 - LEAST_GAIN) * own_us:
                chosen, takes = engine, f"{engine.title} runs the step: it is predicted to take {as_time(engine.predicted_us)}, {own}"
            else:
                takes += f", {own}; it is not chosen, not being {LEAST_GAIN:.0%} ahead"
        placement = placement.noting(takes)
    if chosen is not None:  # what is noted of the plan is not what runs
        notes = (*(f"of the plan that it replaces: {note}" for note in own_notes), *placement.result.notes[len(own_notes) :])
        placement = replace(placement, result=replace(placement.result, notes=notes))
    return chosen, placement
