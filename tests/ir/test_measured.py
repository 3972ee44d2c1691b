"""The measured step: its file, and what is refused."""

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baechi_ext.errors import MeasurementError, MismatchError
from baechi_ext.ir.measured import MeasuredOp, MeasuredStep, MeasuredTransfer, ResidentBytes
from tests.build import graph_of

GRAPH = graph_of({"a": 1, "b": 2, "c": 3}, ("a", "b", 8), ("a", "c", 8))
TENSOR = GRAPH.tensors[0].name
STEP = MeasuredStep(
    graph_fingerprint=GRAPH.fingerprint,
    executor="thread",
    clock="monotonic",
    wall_us=9.5,
    ops=(MeasuredOp("a", 0, 0.5, 1.5), MeasuredOp("b", 1, 3.0, 4.5), MeasuredOp("c", 0, 1.5, 1.5)),
    transfers=(MeasuredTransfer("a", TENSOR, 0, 1, 1.5, 2.75),),
    memory=((ResidentBytes(0.0, 8), ResidentBytes(1.5, 0)), ()),
    notes=("a note",),
)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    STEP.save(tmp_path / "measured.json")
    assert MeasuredStep.load(tmp_path / "measured.json", GRAPH) == STEP


@given(st.lists(st.floats(0, 1e9), min_size=6, max_size=6).map(sorted), st.permutations(["a", "b", "c"]))
def test_any_ops_one_after_the_other_are_read_back(times: list[float], ids: list[str]) -> None:
    ops = tuple(MeasuredOp(id_, 0, *times[2 * i : 2 * i + 2]) for i, id_ in enumerate(ids))
    step = MeasuredStep("", "", "", times[-1], ops)
    assert MeasuredStep.from_json(step.to_json(), GRAPH) == step


def test_busy_times_are_sums_of_a_devices_ops() -> None:
    assert STEP.busy_us(3) == (1.0, 1.5, 0.0)


def broken(*path: str | int, value: Any) -> dict[str, Any]:
    found = copy.deepcopy(STEP.to_json())
    inner: Any = found
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return found


WRONG = [
    (("kind",), "baechi checkpoint", MeasurementError, "is a 'baechi checkpoint', not a"),
    (("wall_us",), float("nan"), MeasurementError, r"Expected `float` >= 0.0 - at `\$.wall_us`"),
    (("wall_us",), float("inf"), MeasurementError, r"Expected `float` <= .* - at `\$.wall_us`"),
    (("wall_us",), 10**400, MeasurementError, "the measured step is broken: "),
    (("wall_us",), True, MeasurementError, r"Expected `float`, got `bool` - at `\$.wall_us`"),
    (("ops",), {}, MeasurementError, r"Expected `array`, got `object` - at `\$.ops`"),
    (("ops", 0, "id"), "other", MismatchError, "it has the op 'other', which the graph lacks"),
    (("ops", 1, "id"), "a", MeasurementError, "op 'a' appears twice"),
    (("ops", 1, "device"), 0.5, MeasurementError, r"Expected `int`, got `float` - at `\$.ops\[1\].device`"),
    (("ops", 1, "start_us"), 5.0, MeasurementError, "op 'b' ends at 4.5 us, before it starts at 5 us"),
    (("ops", 2, "start_us"), 1.25, MeasurementError, "ops 'a' and 'c' overlap on device 0"),
    (("transfers", 0, "target"), 0, MeasurementError, "goes from device 0 to itself"),
    (("transfers", 0, "tensor"), None, MeasurementError, r"Expected `str`, got `null` - at `\$.transfers\[0\].tensor`"),
    (("transfers", 0, "tensor"), "none", MismatchError, "op 'a' has no output 'none'"),
    (("transfers", 0, "op"), "x", MismatchError, "it has the transfer of an output of 'x'"),
    (("memory",), 5, MeasurementError, r"got `int` - at `\$.memory`"),
    (("memory", 0, 1, "at_us"), "soon", MeasurementError, r"Expected `float`, got `str` - at `\$.memory\[0\]\[1\].at_us`"),
    (("memory", 0, 0, "at_us"), 2.0, MeasurementError, "memory of device 0 is not in the order of time"),
    (("graph_fingerprint",), "0" * 64, MismatchError, "its fingerprint is 000000000000"),
]


@pytest.mark.parametrize(("path", "value", "error", "message"), WRONG, ids=[w[3] for w in WRONG])
def test_what_is_refused(path: tuple[str | int, ...], value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MeasuredStep.from_json(broken(*path, value=value), GRAPH)
