"""Planted cases: their plans are kept within their limits, and by whom they are found."""

import json
from pathlib import Path

import pytest

from baechi_ext.ir.plan import memory_violations, placement_violations
from baechi_ext.simulate import simulate
from benchmarks import tight


@pytest.mark.parametrize("case", [case for cases in tight.SETS.values() for case in cases if case.ops <= 500], ids=lambda case: case.name)
def test_the_planted_plan_is_valid_and_leaves_nothing_over(case: tight.Planted) -> None:
    plan = tight.planted_plans()[case.name]
    cluster = case.limited_to(plan, 1.0)
    placement, priority = tight.decoded(plan)
    peaks = simulate(case.graph, cluster, placement, priority).peak_memory_bytes
    assert placement_violations(case.graph, cluster, placement) + memory_violations(cluster, peaks) == []
    limits = [d.memory_bytes for d in cluster.devices]
    assert max(limits) == max(peaks)
    assert (case.memory == "equal") == (len(set(limits)) == 1)


def test_every_case_has_a_plan_and_the_sets_share_no_graph() -> None:
    plans = tight.planted_plans()
    cases = [case for cases in tight.SETS.values() for case in cases]
    assert sorted(plans) == sorted(case.name for case in cases)
    assert len({case.seed for case in cases}) == len(cases)


def test_a_table_of_who_finds_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "tight.json"
    tight.main(["--set=tuning", "--cases=random-20", "--methods=auto,single", "--slack=1.05", "--time_limit=5", f"--out={out}"])
    rows = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert [row["case"] for row in rows] == ["random-20-1-2-equal"]
    assert rows[0]["cells"]["auto"]["status"] in ("feasible", "optimal")
    assert rows[0]["cells"]["single"]["status"] == "unknown"
    assert "tuning" in capsys.readouterr().out
