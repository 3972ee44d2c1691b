"""A method that takes part in a comparison: its plan, and what runs it; or why it has none. The same for every framework."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from baechi_ext.errors import BaechiError
from baechi_ext.ir import Cluster, OpGraph
from baechi_ext.place.common import PlanResult
from baechi_ext.simulate import Timeline
from runtime import pipeline
from runtime.parity_result import Parity
from runtime.progress import progress
from runtime.tables import search_news
from runtime.train_request import TrainRequest

SINGLE = "single"
"""The method that is always there: one device, beside which all others are seen."""


@dataclass(frozen=True)
class CompareRequest:
    """What is compared: everything but the method is as `train` has it."""

    train: TrainRequest
    plans: Mapping[str, pipeline.PlanRequest]
    """By method, in the order of the table."""


@dataclass
class Contender:
    """One method."""

    method: str
    result: PlanResult | None = None
    loaded: Any = None
    """What runs its step, where it stays loaded."""
    parity: Parity | None = None
    peak_bytes: tuple[int, ...] = ()
    notes: list[str] = field(default_factory=list)
    refusal: str = ""
    """Why it is not measured."""


def planned(
    graph: OpGraph, cluster: Cluster, plans: Mapping[str, pipeline.PlanRequest], single: Timeline, load: Callable[[Contender], None]
) -> Iterator[Contender]:
    """The contenders with their plans, and with what `load` makes of each. What a method raises is its refusal; the others go on.

    `single` is one device with the others idle. Raises KeyboardInterrupt.
    """
    for number, (method, request) in enumerate(plans.items(), start=1):
        contender: Contender = Contender(method)
        try:
            with progress(f"{pipeline.announcement(graph, cluster, request)} ({number} of {len(plans)})") as show:
                result = pipeline.plan(graph, cluster, request.watched(lambda search, show=show: show(search_news(search))))
            if result.interrupted:
                raise KeyboardInterrupt
            contender.result = pipeline.whole_if_faster(result, graph, cluster, request, single)
            contender.notes += contender.result.notes
            with progress(f"checking {method}: the same results as the unplaced step, and its memory ({number} of {len(plans)})"):
                load(contender)
        except BaechiError as e:
            contender.refusal, contender.loaded = str(e), None
        yield contender
