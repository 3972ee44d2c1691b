"""docs/speed.md, and the times in docs/tensorflow.md, say what the committed results say: the tables are computed anew, the commands are
those of the results they name."""

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from runtime.tables import as_time

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE, TENSORFLOW_PAGE = ((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("speed", "tensorflow"))
MODELS = ("wide_towers", "inception_v3", "gnmt_v2", "nasnet", "transformer", "gpt2", "resnet101", "alexnet", "rnnlm")
TENSORFLOW = ("wide_towers", "gnmt_v2", "inception_v3", "nasnet")


def read(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def table(heading: str, page: str = PAGE) -> dict[str, list[str]]:
    """The rows of the first table below a heading, by their first cell without what follows a comma."""
    section = page.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("|")]
    return {cells[0].partition(",")[0].strip("`"): cells[1:] for cells in rows[2:]}


def times(row: dict[str, Any] | None) -> str:
    """How many times as fast as eager, with its interval."""
    if row is None:
        return "not possible"
    ratio = row["times_eager"]
    return f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"


def variants(name: str) -> dict[str, dict[str, Any]]:
    return {row["variant"]: row for row in read(name)["rows"]}


def test_the_table_of_steps_has_all_models() -> None:
    assert tuple(table("What a placed step gains")) == MODELS


@pytest.mark.parametrize("model", MODELS)
def test_steps(model: str) -> None:
    rows = variants(f"step_time_{model}_2_processes.json")
    auto = rows["auto"]
    assert table("What a placed step gains")[model] == [
        as_time(rows["eager"]["measured_us"]["median"]),
        as_time(auto["measured_us"]["median"]),
        times(auto),
        f"{auto['prediction_error']:+.1%}",
        f"{rows['single']['predicted_us'] / auto['lower_bound_us']:.2f}",
        *(times(rows.get(name)) for name in ("m_sct", "contiguous", "ddp", "pipelining")),
    ]


@pytest.mark.parametrize("model", TENSORFLOW)
def test_steps_of_tensorflow(model: str) -> None:
    rows = variants(f"step_time_tensorflow_{model}.json")
    names = ("single", "contiguous", "expert", "m_topo", "m_etf", "m_sct", "auto", "tf.device")
    expected = [f"{rows['eager']['measured_us']['median'] / 1000:.0f} ms", *(briefly(rows.get(name)) for name in names)]
    assert table("Step times", TENSORFLOW_PAGE)[model] == expected


def briefly(row: dict[str, Any] | None) -> str:
    """How many times as fast as tf.function, and how far the prediction was off."""
    if row is None:
        return "-"
    off = "" if row["prediction_error"] is None else f" ({row['prediction_error']:+.0%})"
    return f"{row['times_eager']['median']:.2f}{off}"


def test_quality_of_plans() -> None:
    text = (RESULTS / "quality.md").read_text(encoding="utf-8")
    lines = text.split("Geometric means over the cases with a plan", 1)[1].splitlines()
    means = {cells[0]: cells[1:] for line in lines if len(cells := [c.strip() for c in line.strip("|").split("|")]) > 5}
    columns = [means["method"].index(name) for name in ("plans", "over bound", "over annealing", "median s")]
    found = table("How good the plans are")
    assert len(found) >= 8
    for method, cells in found.items():
        assert cells == [means[method][c] for c in columns], method


def test_seconds_to_place() -> None:
    rows = {(row["task"], row["ops"]): statistics.median(row["seconds"]) for row in read("placers.json")["rows"]}
    for ops, cells in table("How long placing takes").items():
        expected = [f"{rows[m, int(ops)]:.2g} s" if (m, int(ops)) in rows else "" for m in ("m_etf", "m_sct")]
        assert cells == expected, ops


def test_every_command_is_that_of_a_committed_result() -> None:
    commands = set()
    for path in RESULTS.glob("*.json"):
        result = json.loads(path.read_text(encoding="utf-8"))
        commands.add(result.get("command"))
    said = re.findall(r"^    (python -m benchmarks\..*)$", PAGE, re.MULTILINE)
    assert len(said) >= 5
    for line in said:
        assert line in commands, line
