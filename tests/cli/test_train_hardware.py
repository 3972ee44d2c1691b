"""--hardware: plans for devices that are not here, of models that need not fit into memory."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from baechi_ext.cost import HARDWARE, Profile
from baechi_ext.cost.hardware import COUNTED, OF_OPS, SCALED
from baechi_ext.ir import OpGraph, Plan
from baechi_ext.simulate.one_device import one_device_timeline
from tests.cli.files import ROOT, write
from tests.runtime.forked import output

Run = Callable[..., tuple[int, str, str]]
SMALL = ("--model_name=alexnet", "--batch_size=4", "--image_size=64", "--time_limit=0.2")
H100 = HARDWARE["h100"]


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("planned")
    printed = output("train", *SMALL, "--hardware=h100", "--num_devices=2", f"--out={folder}", "--json")
    (folder / "printed.json").write_text(printed, encoding="utf-8")
    return folder


def test_a_model_is_planned_and_not_run(planned: Path) -> None:
    graph, printed = OpGraph.load(planned / "graph.json"), json.loads((planned / "printed.json").read_text())
    assert {path.name for path in planned.iterdir()} == {"config.toml", "graph.json", "plan.json", "printed.json"}
    assert [op.compute_us for op in graph.ops] == pytest.approx([H100.roofline_us(op) * COUNTED.middle for op in graph.ops])
    plan = Plan.load(planned / "plan.json", graph)
    assert [(d.name, d.memory_bytes) for d in plan.cluster.devices] == [("h100:0", 80e9), ("h100:1", 80e9)]
    step, found = printed["predicted_step_us"], printed["elsewhere"]
    assert step == plan.predicted_step_us
    assert found["step_range_us"] == pytest.approx([step * OF_OPS.low / COUNTED.middle, step * OF_OPS.high / COUNTED.middle])
    assert (found["hardware"]["name"], found["hardware"]["source"], found["measured_on"]) == ("h100", H100.source, None)


def test_a_graph_with_counts_is_placed_for_other_hardware(planned: Path, tmp_path: Path, run: Run) -> None:
    graph = OpGraph.load(planned / "graph.json")
    us = write(tmp_path / "measured.json", graph.replace_ops(graph.ops).to_json())
    code, out, _ = run("place", us, "--hardware=a100", "--measured_on=h100", "--num_devices=1", "--placement_method=single", "--json")
    found = json.loads(out)
    a100 = HARDWARE["a100"]
    expected = sum(op.compute_us * a100.roofline_us(op) / H100.roofline_us(op) for op in graph.ops)
    assert (code, found["predicted_step_us"]) == (0, pytest.approx(expected))
    assert found["elsewhere"]["step_range_us"] == pytest.approx([expected * SCALED.low, expected * SCALED.high])
    flags = ("--num_devices=2", "--device_memory=1GB", "--comm_cost_coeffs=1,1", "--time_limit=0.2")
    code, out, _ = run("place", us, "--hardware=a100", *flags)
    assert code == 0
    for said in (
        "planned for     2 x a100, not run",
        "no step on a GPU was compared",
        "counted operations and bytes; memory that ops need while",
        a100.source,
    ):
        assert said in out


def test_whether_to_split_is_said(planned: Path, run: Run) -> None:
    graph = planned / "graph.json"
    held = one_device_timeline(OpGraph.load(graph)).peak_memory_bytes[0]
    dear = ("--comm_cost_coeffs=1,1000", "--time_limit=0.2")
    verdicts = [
        json.loads(run("place", graph, "--hardware=h100", "--num_devices=2", *dear, *more, "--json")[1])["elsewhere"]["verdict"]
        for more in ((), (f"--device_memory={int(held * 0.9)}",))
    ]
    assert verdicts[0].startswith("do not split: nothing faster than one device was found; one device takes")
    assert verdicts[1].startswith("split: one device does not hold it,")
    scattered = run("place", graph, "--hardware=h100", "--num_devices=2", *dear, "--placement_method=random", "--json")[1]
    assert json.loads(scattered)["elsewhere"]["verdict"].startswith("do not split: 0.")


def test_measured_costs_of_this_machine_are_scaled(planned: Path, tmp_path: Path, run: Run) -> None:
    """A profile fits the graph that was captured without values: it is the same one."""
    graph, costs = OpGraph.load(planned / "graph.json"), tmp_path / "cost.json"
    assert run("train", *SMALL, "--costgen", f"--cost_path={costs}", "--num_devices=1")[0] == 0
    Profile.load(costs, graph)
    words = ("--hardware=rtx4090", "--num_devices=2", f"--cost_path={costs}", "--measured_on=cpu", f"--out={tmp_path / 'out'}")
    code, out, err = run("train", *SMALL, *words)
    assert (code, "measured on cpu (a core of" in out, "beyond their outputs, is not known" in out) == (0, True, False), err
    on_card, measured = OpGraph.load(tmp_path / "out" / "graph.json"), Profile.load(costs, graph).compute_us()
    ratios = {op.op: op.compute_us / measured[op.id] for op in on_card.ops}
    assert ratios["aten.convolution"] < ratios["input"] / 4  # a card computes faster, and nothing starts faster for it


def test_a_model_larger_than_its_planning_takes_is_captured(tmp_path: Path, run: Run) -> None:
    # VmHWM is this program's own peak; a child's ru_maxrss begins with what its parent held when it was forked.
    code = (
        "import sys; from baechi_runtime.cli.main import main; code = main(sys.argv[1:]);"
        "peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM'));"
        "sys.stderr.write(peak.split()[1]); sys.exit(code)"
    )
    words = ["train", "--model_name=alexnet", "--image_size=1024", "--hardware=h100", "--num_devices=1", "--json", "--quiet"]
    done = subprocess.run([sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    weights = json.loads(done.stdout)["elsewhere"]["one_device_bytes"]
    assert weights > 4e9
    assert int(done.stderr) * 1024 < weights / 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train --measured_on=h100", "--measured_on is for --hardware"),
        ("train --hardware=h100 --measured_on=cpu", "--cost_path and --measured_on go together with --hardware"),
        ("train --hardware=h100 --cost_path=x.json", "--cost_path and --measured_on go together with --hardware"),
        ("train --hardware=h100 --train_steps=3", "runs nothing; drop --train_steps"),
        ("train --hardware=h100 --framework=tensorflow", "runs nothing; drop --framework=tensorflow"),
        ("train s.py --hardware=h100", "--hardware plans a built-in model; for s.py give baechi place its graph"),
        ("train --hardware=h200", "unknown value 'h200' (did you mean h100?); choose one of h100, a100, rtx4090, cpu"),
        ("place g.json --hardware=h100", "--hardware=h100 is what the devices are; add --num_devices=N"),
        ("place g.json --measured_on=h100 --num_devices=2", "--measured_on is for --hardware"),
        ("place g.json --hardware=cpu --num_devices=2", "unknown value 'cpu'"),
    ],
)
def test_flags_that_contradict_it_are_refused(words: str, said: str, run: Run) -> None:
    code, out, err = run(*words.split())
    assert (code, out) == (2, "")
    assert said in err


def test_a_graph_without_counts_is_refused(graph: Path, run: Run) -> None:
    code, out, err = run("place", graph, "--hardware=h100", "--num_devices=2")
    assert (code, out) == (1, "")
    assert "has no moved_bytes, so what it takes on h100 is not known; capture the graph again" in err
