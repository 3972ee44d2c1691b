"""Traces of runs, simulated, made up and real, against the rules of the format; and what they say."""

import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baechi_ext.ir import Cluster, OpGraph, Plan
from baechi_ext.ir.measured import MeasuredOp, MeasuredStep, MeasuredTransfer, ResidentBytes
from baechi_ext.simulate import Timeline, simulate
from baechi_runtime.files.run_folder import RunFolder
from baechi_runtime.report.trace import trace, write_trace
from tests.build import cluster_of, graph_of
from tests.runtime.chrome_trace import problems_of
from tests.simulate.strategies import cases

GRAPH = graph_of({"a": 2, "view": 0, "b": 3, "c": 4}, ("a", "view", 0, "o"), ("a", "b", 8, "x"), ("view", "c", 0), module={"a": "net.a"})
CLUSTER = cluster_of(2)
RUN = RunFolder(Path("run"), GRAPH, Plan(GRAPH, "m_etf", "feasible", CLUSTER, (0, 0, 1, 0), None, 0, 0, (), 0.0), None, None, None)
STEP = MeasuredStep(
    GRAPH.fingerprint,
    "thread",
    "monotonic",
    20.0,
    (MeasuredOp("a", 0, 1, 3.0004), MeasuredOp("view", 0, 3.0004, 3.0004), MeasuredOp("b", 1, 7, 11), MeasuredOp("c", 0, 3.0004, 9)),
    (MeasuredTransfer("a", "x", 0, 1, 2.5, 6.5),),
    ((ResidentBytes(0.0, 1), ResidentBytes(3.0, 9)), (ResidentBytes(0.0, 2),)),
)


def slices(found: dict[str, Any], process: str) -> Iterator[dict[str, Any]]:
    pid = next(e["pid"] for e in found["traceEvents"] if e["name"] == "process_name" and e["args"]["name"] == process)
    return (e for e in found["traceEvents"] if e["ph"] == "X" and e["pid"] == pid)


def run_of(graph: OpGraph, cluster: Cluster, placement: list[int], measured: MeasuredStep | None = None) -> RunFolder:
    plan = Plan(graph, "", "feasible", cluster, tuple(placement), None, 0, 0, (), 0.0)
    return RunFolder(Path("run"), graph, plan, None, None, measured)


def as_measured(timeline: Timeline, stretch: float) -> MeasuredStep:
    """A measured step as the timeline has it, slower or faster, its transfers a little early, and one op never seen."""
    graph = timeline.graph
    ops = [
        MeasuredOp(op.id, d, start * stretch, end * stretch)
        for op, d, start, end in zip(graph.ops, timeline.placement, timeline.start_us, timeline.end_us, strict=True)
    ]
    transfers = []
    for t in timeline.transfers:
        made = graph.tensors[t.tensor]
        times = max(0.0, t.start_us * stretch - 0.25), t.end_us * stretch
        transfers.append(MeasuredTransfer(graph.ops[made.producer].id, made.name, t.source, t.target, *times))
    return MeasuredStep(graph.fingerprint, "", "", timeline.makespan_us * stretch, tuple(ops[1:]), tuple(transfers))


@given(cases(), st.data())
def test_simulated_and_measured_steps_keep_to_the_format(case: tuple[OpGraph, Cluster], data: st.DataObject) -> None:
    graph, cluster = case
    placement = data.draw(st.lists(st.integers(0, len(cluster) - 1), min_size=len(graph), max_size=len(graph)))
    predicted = run_of(graph, cluster, placement)
    step = as_measured(predicted.timeline, data.draw(st.sampled_from([1 / 3, 0.1, 1.0, 7.7777])))
    both = replace(predicted, measured=step)
    timeline = simulate(graph, cluster, placement)
    for run, steps in ((predicted, 1), (both, 2)):
        found = trace(run)
        assert problems_of(found) == []
        ops = sum(e["ph"] == "X" and e["cat"] == "kernel" for e in found["traceEvents"])
        assert ops == steps * len(graph) - (steps - 1)
        copies = sum(e["ph"] == "X" and e["cat"] == "gpu_memcpy" for e in found["traceEvents"])
        assert copies == steps * 2 * len(timeline.transfers)
        assert all(problems_of(trace(run, device)) == [] for device in range(len(cluster)))
        assert sum(e["ph"] == "s" for e in found["traceEvents"]) >= len(timeline.transfers)
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_predicted_beside_measured() -> None:
    found = trace(replace(RUN, measured=STEP))
    named = {e["args"]["name"]: e["pid"] for e in found["traceEvents"] if e["name"] == "process_name"}
    order = [f"device:{d} {kind}" for d in (0, 1) for kind in ("predicted", "measured")]
    assert sorted(named, key=named.__getitem__) == order
    a = next(s for s in slices(found, "device:0 measured") if s["name"] == "a")
    assert (a["ts"], a["dur"]) == (1.0, 2.0)
    assert a["args"] == {
        "op": "test",
        "phase": "forward",
        "module": "net.a",
        "predicted_start_us": 0.0,
        "measured_start_us": 1.0,
        "predicted_us": 2.0,
        "measured_us": 2.0,
        "output_bytes": 0,
        "persistent_bytes": 0,
        "temporary_bytes": 0,
        "stream": 1,
    }
    copy = next(s for s in slices(found, "device:1 measured") if s["cat"] == "gpu_memcpy")
    assert copy["name"] == "Memcpy device:0 -> device:1"
    assert copy["args"].items() >= {"op": "a", "bytes": 8, "predicted_us": 8.0, "measured_us": 4.0, "direction": "copy-in"}.items()
    assert [s["name"] for s in slices(found, "device:1 predicted")] == ["Memcpy device:0 -> device:1", "b"]
    assert not any("stream" in s["args"] for s in slices(found, "device:1 predicted"))  # which HTA would add to the measured ones
    held = [e["args"]["bytes"] for e in found["traceEvents"] if e["ph"] == "C" and e["pid"] == named["device:0 measured"]]
    assert held == [1, 9]


def test_an_arrow_goes_from_the_op_over_its_copies_to_the_reader() -> None:
    events = trace(replace(RUN, measured=STEP))["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    (first, *_) = {e["id"] for e in events if e["ph"] == "s"}
    path = [(e["ph"], rows[e["tid"]]) for e in events if e.get("id") == first]
    assert path == [("s", "compute"), ("t", "copy-out"), ("t", "copy-in"), ("f", "compute")]


def test_a_reader_that_a_clock_says_came_first_gets_no_arrow() -> None:
    early = replace(STEP, ops=(*STEP.ops[:2], MeasuredOp("b", 1, 0.0, 2.0), STEP.ops[3]))
    found = trace(replace(RUN, measured=early))
    assert problems_of(found) == []
    assert len({e["id"] for e in found["traceEvents"] if e["ph"] == "s"}) == 1  # the predicted one


def test_a_device_by_itself_has_its_rank() -> None:
    found = trace(replace(RUN, measured=STEP), 1)
    assert found["distributedInfo"] == {"rank": 1, "world_size": 2}
    assert {e["args"]["name"] for e in found["traceEvents"] if e["name"] == "process_name"} == {"device:1 predicted", "device:1 measured"}
    assert not any(e["ph"] in "stf" for e in found["traceEvents"])


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_what_is_written(tmp_path: Path, name: str) -> None:
    """HTA finds a file's rank by the text `"rank": `, with a space."""
    hostile = OpGraph.from_json(graph_of({'</script>"\u2028\ud800': 1, "b": 1}, ('</script>"\u2028\ud800', "b", 1)).to_json())
    run = run_of(hostile, CLUSTER, [0, 1])
    hostile.save(tmp_path / "graph.json")
    run.plan.save(tmp_path / "plan.json")
    path = write_trace(str(tmp_path), str(tmp_path / name), str(tmp_path / "ranks"))
    content = path.read_bytes()
    text = (gzip.decompress(content) if name.endswith(".gz") else content).decode()
    assert text.isascii()
    assert '"rank": 0' in text
    assert json.loads(text) == trace(RunFolder.load(tmp_path))
    assert sorted(p.name for p in (tmp_path / "ranks").iterdir()) == ["rank_0.json", "rank_1.json"]
    assert '"rank": 1' in (tmp_path / "ranks" / "rank_1.json").read_text()


def event(ph: str, ts: float, **fields: Any) -> dict[str, Any]:
    return {"ph": ph, "name": "n", "cat": "c", "pid": 1, "tid": 1, "ts": ts, **fields}


NAMED = [
    {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "p"}},
    {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "t"}},
]
WRONG = {
    "overlap in part": [event("X", 0, dur=2), event("X", 1, dur=2)],
    "order of time": [event("X", 1, dur=2), event("X", 0, dur=1)],
    "unknown phase": [event("Q", 1)],
    "ts of": [event("X", float("nan"), dur=1)],
    "dur or cat of": [event("X", 0, dur=-1)],
    "is in no slice": [event("X", 0, dur=1), event("s", 1, id=1), event("f", 1, id=1, bp="e")],
    "goes s": [event("X", 0, dur=2), event("s", 1, id=1)],
    "goes fs": [event("X", 0, dur=2), event("f", 1, id=1, bp="e"), event("s", 1, id=1)],
    "ends in the next slice": [event("X", 0, dur=2), event("s", 1, id=1), event("f", 1, id=1)],
    "has no name": [event("X", 0, dur=1, tid=2)],
}


@pytest.mark.parametrize("said", WRONG)
def test_the_checker_sees_what_is_wrong(said: str) -> None:
    found = problems_of({"traceEvents": [*NAMED, *WRONG[said]]})
    assert any(said in problem for problem in found), found


def test_the_checker_takes_what_is_right() -> None:
    right = [event("X", 0, dur=3), event("X", 1, dur=0), event("X", 1, dur=2), event("s", 2, id=1), event("f", 2, id=1, bp="e")]
    assert problems_of({"traceEvents": [*NAMED, *right]}) == []
