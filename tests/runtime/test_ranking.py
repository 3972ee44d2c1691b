"""The choice between a plan, one of parts of the batch, and engines of a framework's own, by the steps that they are said to take: here by
hand."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from baechi_ext.cost import Profile
from baechi_ext.ir import Cluster, OpGraph
from baechi_ext.place.common import PlanResult
from baechi_ext.simulate.one_device import one_device_timeline
from baechi_runtime.drivers import comparing, pipeline
from baechi_runtime.drivers.backend import Captured
from baechi_runtime.drivers.comparison import CompareRequest, Contender
from baechi_runtime.drivers.pipeline import PlanRequest, plan
from baechi_runtime.drivers.placement import Placement, place_in_parts
from baechi_runtime.drivers.ranking import Engine, ranked
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.report.findings import Findings
from tests.build import cluster_of, graph_of

CHAIN = graph_of({"a": 100, "b": 100, "c": 100}, ("a", "b", 0), ("b", "c", 0))
"""On two devices it takes 300 us, as on one."""


@dataclass
class Told:
    """Engines whose steps, and the plan's, take what a test says."""

    steps_us: dict[str, float | None]
    plan_us: float
    refused: tuple[str, ...] = ()
    asked: list[str] = field(default_factory=list)

    def predicted(self, whole: str, placement: Placement, cluster: Cluster, enough_us: float) -> Sequence[Engine]:
        self.asked.append(f"engines up to {enough_us:g} us")
        return [Engine(name, name.upper(), us, "" if us else "too large") for name, us in self.steps_us.items()]

    def rehearse(self, placement: Placement) -> Placement:
        self.asked.append("the plan")
        return replace(placement, rehearsed_us=self.plan_us)

    def refusal(self, whole: str, engine: Engine) -> str:
        return "it draws other numbers" if engine.name in self.refused else ""

    def run(self, whole: str, engine: Engine, placement: Placement) -> Findings:
        raise AssertionError("nothing is run here")


def choice(told: Told, graph: Any = CHAIN) -> tuple[str | None, tuple[str, ...]]:
    """The engine, and the notes on all; what was noted of the plan is said to be of it, and it alone, where it does not run."""
    cluster = cluster_of(2)
    placement = Placement(graph, None, plan(graph, cluster, PlanRequest("m_etf")), one_device_timeline(graph)).noting("in 2 parts")
    engine, noted = ranked("whole", placement, cluster, told, told.rehearse)
    own = len(placement.result.notes)
    ahead = "" if engine is None else "of the plan that it replaces: "
    assert noted.result.notes[:own] == tuple(f"{ahead}{note}" for note in placement.result.notes)
    return None if engine is None else engine.name, noted.result.notes[own:]


@pytest.mark.parametrize(
    ("steps_us", "plan_us", "chosen"),
    [
        ({"ddp": 280, "fsdp2": 290}, 300, "ddp"),
        ({"ddp": 290, "fsdp2": 280}, 300, "fsdp2"),
        ({"ddp": 290, "fsdp2": 290}, 300, None),  # not 5% ahead
        ({"ddp": 350, "fsdp2": 900}, 400, "ddp"),  # the plan takes longer than predicted
        ({"ddp": 280, "fsdp2": 900}, 250, None),  # and here less
        ({"ddp": None, "fsdp2": 280}, 300, "fsdp2"),
    ],
)
def test_real_steps_of_both_decide(steps_us: dict[str, float | None], plan_us: float, chosen: str | None) -> None:
    told = Told(steps_us, plan_us)
    found, notes = choice(told)
    assert found == chosen
    assert told.asked == ["engines up to 450 us", "the plan"]
    assert sum(f"of which a few steps took {plan_us}" in note for note in notes) == 1
    assert sum("runs the step" in note for note in notes) == (chosen is not None)
    assert len(notes) == 2


def test_a_plan_that_no_engine_comes_near_is_not_rehearsed() -> None:
    told = Told({"ddp": 451, "fsdp2": 1000}, 9999)
    assert choice(told) == (None, ("DDP is predicted to take 451 us", "FSDP2 is predicted to take 1 ms"))
    assert told.asked == ["engines up to 450 us"]


def test_the_next_engine_has_its_turn_where_the_fastest_computes_another_step() -> None:
    found, notes = choice(Told({"ddp": 200, "fsdp2": 250}, 300, refused=("ddp",)))
    assert found == "fsdp2"
    assert "is not chosen: it draws other numbers; --sharding=ddp runs it all the same" in notes[0]


def test_a_sharding_that_computes_another_step_runs_by_no_flag() -> None:
    """`--sharding=pase` checks what it runs, too."""
    _, (note,) = choice(Told({"pase": 200}, 300, refused=("pase",)))
    assert note.endswith("is not chosen: it draws other numbers")


def test_where_all_compute_another_step_the_plan_is_not_rehearsed() -> None:
    told = Told({"ddp": 200}, 300, refused=("ddp",))
    assert choice(told)[0] is None
    assert told.asked == ["engines up to 450 us"]


def test_a_plan_that_keeps_all_devices_at_work_is_kept_untried() -> None:
    told = Told({"ddp": 1}, 9999)
    assert choice(told, graph_of({"a": 100, "b": 100})) == (None, ())
    assert told.asked == []


@dataclass(frozen=True)
class Examples(Captured):
    count: int = 2

    @property
    def batch(self) -> int:
        return self.count


def examples(graph: OpGraph, count: int = 2) -> Examples:
    return Examples(graph, graph, Profile(graph.fingerprint, {}, "", 0, {}), count=count)


@dataclass
class Halves:
    """A source of steps in two parts, each op of which takes so long."""

    op_us: float
    request: TrainRequest = TrainRequest("halves", PlanRequest("m_etf"), microbatches=None)

    def in_parts(self, captured: Examples, parts: Any) -> Examples:
        costs = dict.fromkeys((f"{op}{half}" for op in "abc" for half in (1, 2)), self.op_us)
        return examples(graph_of(costs, *((f"{a}{half}", f"{b}{half}", 0) for a, b in ("ab", "bc") for half in (1, 2))))


@pytest.mark.parametrize(
    ("op_us", "real_us", "in_parts", "said"),
    [
        (75, None, True, "the batch goes in 2 parts (1, 1 examples); whole it is predicted to take 300 us"),
        (130, None, False, "the batch stays whole; in 2 parts (1, 1 examples) it is predicted to take 390 us"),
        (90, (310, 330), False, "the batch stays whole; in 2 parts (1, 1 examples) a few steps took 330 us, and these 310 us"),
        (90, (310, 320), True, "the batch goes in 2 parts (1, 1 examples); whole a few steps took 310 us, and these 320 us"),
        (110, (310, 300), False, "the batch stays whole; in 2 parts (1, 1 examples) a few steps took 300 us, and these 310 us"),
        (90, (310, 280), True, "the batch goes in 2 parts (1, 1 examples); whole a few steps took 310 us, and these 280 us"),
        (110, (310, 280), True, "the batch goes in 2 parts (1, 1 examples); whole a few steps took 310 us, and these 280 us"),
    ],
)
def test_where_predictions_of_parts_are_in_doubt_real_steps_decide(
    op_us: float, real_us: tuple[float, float] | None, in_parts: bool, said: str
) -> None:
    whole, asked = examples(CHAIN), []

    def rehearse(captured: Examples, placement: Placement) -> Placement:
        asked.append(captured)
        assert real_us is not None
        return replace(placement, rehearsed_us=real_us[captured is not whole])

    source = Halves(op_us)
    captured, placement = place_in_parts(source, whole, (cluster_of(2), None), rehearse=rehearse)
    assert captured is not whole if in_parts else captured is whole
    ends = "; less than 5% apart, so the predictions decide" if real_us and max(real_us) < 1.05 * min(real_us) else ""
    assert placement.result.notes[-1] == said + ends
    assert len(asked) == (0 if real_us is None else 2)
    assert placement.rehearsed_us == (None if real_us is None else real_us[in_parts])
    if real_us is not None:  # nothing can be run, as of hardware that is not here
        captured, placement = place_in_parts(source, whole, (cluster_of(2), None))
        assert (captured is not whole) == (op_us < 100)
        assert "predicted" in placement.result.notes[-1]


@pytest.mark.parametrize(("count", "speeds"), [(1, (1.0, 1.0)), (2, (1.0, 0.3))])
def test_a_comparison_tries_no_single_part(count: int, speeds: tuple[float, float]) -> None:
    """It would be the whole batch. The engines are tried all the same."""
    cluster = cluster_of(2, speeds=speeds)
    whole, engines = examples(CHAIN, count), Told({"ddp": 1000.0, "pase": 1000.0}, 300)
    request = CompareRequest(TrainRequest("chain", PlanRequest(), microbatches=None), {"auto": PlanRequest()})
    backend: Any = None  # which nobody asks
    auto = Contender("auto", plan(CHAIN, cluster, PlanRequest("m_etf")), step=whole)
    assert comparing._beside_auto(request, backend, [auto], (cluster, None), None) == []
    found = comparing._beside_auto(request, backend, [auto], (cluster, None), engines)
    assert [(c.method, c.flag) for c in found] == [("ddp", "--sharding=ddp"), ("pase", "")]


@pytest.mark.parametrize("op_us", [75, 130])
def test_an_interrupt_of_the_search_over_parts_is_one_whichever_plan_is_the_faster(op_us: float, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = pipeline.plan

    def stopped(graph: OpGraph, cluster: Cluster, request: PlanRequest) -> PlanResult:
        return replace(plan(graph, cluster, request), interrupted=len(graph) > len(CHAIN))

    monkeypatch.setattr(pipeline, "plan", stopped)
    whole = examples(CHAIN)
    captured, placement = place_in_parts(Halves(op_us), whole, (cluster_of(2), None))
    assert (placement.result.interrupted, captured is whole) == (True, op_us > 100)
