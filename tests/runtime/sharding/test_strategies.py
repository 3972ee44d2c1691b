"""The strategies that are run: which are refused, by a plan's loops and by what devices may hold."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baechi_ext.errors import ShardError
from baechi_ext.ir.made_by import MadeBy
from baechi_ext.shard.baselines import data_parallel
from baechi_ext.shard.machine import Machine
from baechi_ext.shard.plan import ShardPlan
from baechi_ext.shard.search import search
from baechi_ext.shard.tables import bytes_of
from baechi_runtime.sharding.binding import Searched, among_runnable
from baechi_runtime.sharding.captured import captured_graph, forward_graph
from baechi_runtime.sharding.strategies import candidates, predicted
from tests.runtime.sharding.small_models import CASES


def searched(memory_bytes: float | None = None) -> Searched:
    """The report for a small network on four devices."""
    torch.manual_seed(0)
    module, inputs = CASES["mlp"]()
    graph = captured_graph(forward_graph(module, inputs, "mlp"))
    return among_runnable(search(graph.graph, Machine(devices=4, memory_bytes=memory_bytes)), graph)


def test_a_plan_of_other_loops_is_refused(tmp_path: Path) -> None:
    found, file = searched(), tmp_path / "plan.json"
    ShardPlan.of(found.found, 8, "default", {}).save(file, MadeBy(()))
    assert candidates(found, str(file))[0][0] == found.found.strategy
    value: dict[str, Any] = json.loads(file.read_text())
    layer = next(layer for layer in value["shard"].values() if "units" in layer["sizes"])
    for loops in (layer["sizes"], layer["splits"]):
        loops |= {"unit": loops.pop("units")} if "units" in loops else {}
    file.write_text(json.dumps(value))
    with pytest.raises(ShardError, match="with the loops .*unit, and the model's are .*units.*; make a plan of this model"):
        candidates(found, str(file))


def test_a_note_on_a_search_says_by_which_costs_it_was() -> None:
    counted = searched()
    measured = replace(counted, measured=counted.free)
    found = [[note for _, note in candidates(each, "pase") if note.startswith("optimal")] for each in (counted, measured)]
    assert found == [["optimal by counted operations"], ["optimal by measured costs", "optimal by counted operations"]]


def test_what_devices_cannot_hold_is_refused() -> None:
    free = searched()
    most = bytes_of(free.tables, data_parallel(free.tables).choice)
    limited = searched(most - 1)
    assert limited.found.held_bytes < most
    forecaster: Any = None  # which nobody asks
    with pytest.raises(ShardError, match="data_parallel would hold .* on each device, and --device_memory allows .* or --sharding=pase"):
        predicted(limited, forecaster, "data_parallel")
