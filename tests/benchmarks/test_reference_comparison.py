"""The comparison with released placers, on a checkout that is made here: what is fed to it, and what becomes of its answer."""

import json
from pathlib import Path

import numpy as np
import pytest

from baechi_ext.ir import Cluster, Device, Link, Op, OpGraph
from baechi_ext.python_process import command_of, surroundings
from baechi_ext.simulate import lower_bound_us, simulate
from benchmarks import reference_comparison, release
from benchmarks.families import TUNING
from benchmarks.release import UNITS, completed, priorities, solve_lp
from benchmarks.runner import child

LIBRARY = """
import json
import types
from pathlib import Path

import cvxopt
import matplotlib.pyplot as plt
import tensorflow as tf
from future.utils import bytes_to_native_str
from placer.m_etf import ETFDevice
from tensorflow.core.framework import attr_value_pb2
from tensorflow.python.grappler import cluster, item

tf.app.flags.DEFINE_float("ratio", 0.5, "")
tf.app.flags.DEFINE_enum("kind", "a", ["a", "b"], "")


def get_placer(tf_graph, devices, comm_cost_coeffs, cost_factor=None, **options):
    if len(devices) == 3:
        assert devices == [], "three is too many"
    costs = options.pop("cost_dict")
    ops = {
        op.name: {
            "inputs": [tensor.name for tensor in op.inputs],
            "outputs": [tensor.name for tensor in op.outputs],
            "groups": [bytes_to_native_str(group) for group in op.colocation_groups()],
            **vars(costs[op.name]),
        }
        for op in tf_graph.get_operations()
    }
    flags = {"cost_factor": cost_factor, "flags": vars(tf.app.flags.FLAGS)}
    seen = {"ops": ops, "devices": devices, "coefficients": comm_cost_coeffs, **options, **flags}
    Path(__file__).with_name("seen.json").write_text(json.dumps(seen))
    return Placer(list(ops), len(devices))


class Placer:
    def __init__(self, names, count):
        self.op_index = {name: 100 + i for i, name in enumerate(names)}
        nodes = {100 + i: {"name": name, "p": i % count} for i, name in enumerate(names)}
        last = max(nodes)
        nodes[last - 1]["fused_ops"] = [nodes[last]]
        self.op_graph = types.SimpleNamespace(nodes=nodes)

    def run_placement_algorithm(self):
        device = ETFDevice()
        device._op_graph = self.op_graph
        for op_id in sorted(self.op_graph.nodes)[:-1]:
            device.run_op(op_id)
"""
DEVICES = "class ETFDevice:\n    def run_op(self, op_id):\n        self.ran = op_id\n"
OPS = [
    Op("a", compute_us=10, persistent_bytes=5, output_bytes=9, temporary_bytes=2),
    Op("b", compute_us=20, colocation="g"),
    Op("c", compute_us=30, colocation="g"),
]
GRAPH = OpGraph.from_edges(OPS, [("a", "b", 4, "x"), ("a", "c", 4, "x"), ("a", "c", 3, "y"), ("b", "c", 8, "")])
CLUSTER = Cluster.uniform(2, link=Link(0.5, 4.0), memory_bytes=1000)
CASES = {case.name: case for case in TUNING}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout" / "placer"
    folder.mkdir(parents=True)
    (folder / "placer_lib.py").write_text(LIBRARY)
    (folder / "m_etf.py").write_text(DEVICES)
    return folder.parent


def place(checkout: Path, graph: OpGraph, cluster: Cluster, *options: str) -> tuple[int | None, dict]:
    files = checkout.parent / "graph.json", checkout.parent / "cluster.json"
    graph.save(files[0])
    cluster.save(files[1])
    command = command_of("benchmarks.release", "baechi", str(checkout), str(files[0]), f"--cluster={files[1]}", *options)
    code, out, err, *_ = child(command, 60, surroundings())
    assert out, err
    return code, json.loads(out)


def test_what_the_release_is_fed_and_what_it_says(checkout: Path) -> None:
    code, found = place(checkout, GRAPH, CLUSTER, "--method=m_sct", "--fused")
    assert code == 0
    assert (found["placement"], found["priority"]) == ([0, 1, 0], [0, 1, 2])
    seen = json.loads((checkout / "placer" / "seen.json").read_text())
    unit_us = 20 / UNITS
    assert seen["ops"] == {
        "0": {
            "inputs": [],
            "outputs": ["0:0", "0:1", "0:2"],
            "groups": ["loc:@0"],
            "compute_cost": UNITS // 2,
            "output_memory": [4, 3, 5],
            "temporary_memory": 4,
            "persistent_memory": 5,
        },
        "1": {
            "inputs": ["0:0"],
            "outputs": ["1:0"],
            "groups": ["loc:@group g"],
            "compute_cost": UNITS,
            "output_memory": [8],
            "temporary_memory": 0,
            "persistent_memory": 0,
        },
        "2": {
            "inputs": ["0:0", "0:1", "1:0"],
            "outputs": [],
            "groups": ["loc:@group g"],
            "compute_cost": 3 * UNITS // 2,
            "output_memory": [],
            "temporary_memory": 0,
            "persistent_memory": 0,
        },
    }
    assert seen["coefficients"] == pytest.approx([0.5 / unit_us, 4.0 / unit_us])
    assert [(d["name"], d["memory_size"]) for d in seen["devices"]] == [("/device:GPU:0", 1000), ("/device:GPU:1", 1000)]
    assert (seen["placement_method"], seen["placer_type"], seen["grouper"], seen["cost_factor"]) == ("m_sct", "fusion", "coplace", 1.0)
    assert seen["flags"] == {"ratio": 0.5, "kind": "a"}


def test_an_assertion_of_the_release_is_no_plan(checkout: Path) -> None:
    code, found = place(checkout, GRAPH, Cluster.uniform(3), "--method=m_etf")
    assert code == 1
    assert found["status"] == "unknown"
    assert "three is too many" in found["error"]


def test_a_comparison_and_what_goes_on_from_it(checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    options = [f"--baechi={checkout}", "--baechi_version=made up", "--set=tuning", f"--out={out}"]
    reference_comparison.main([*options, "--cases=layered-20-1-2,100-0.1-speeds"])
    result = json.loads(out.read_text())
    assert result["releases"] == {"baechi": "made up"}
    assert list(result["cases"]) == ["layered-20-1-2-loose"]
    case, row = CASES["layered-20-1-2-loose"], result["cases"]["layered-20-1-2-loose"]
    assert row["lower_bound_us"] == lower_bound_us(case.graph, case.cluster)
    names = ["m_etf", "m_etf fused", "m_sct", "m_sct fused"]
    assert list(row["cells"]) == [*names, *(f"baechi {name}" for name in names)]
    placement = [v % 2 for v in range(20)]
    worths = [simulate(case.graph, case.cluster, placement, order).makespan_us for order in (range(20), None)]
    assert row["cells"]["baechi m_etf"]["makespan_us"] == min(worths)
    captured = capsys.readouterr()
    assert result["left_out"]["random-100-0.1-speeds-loose"] == "unequal speeds"
    assert "left out: random-100-0.1-speeds-loose, unequal speeds\n" in captured.out
    ratio = row["cells"]["m_sct"]["makespan_us"] / min(worths)
    lines = [[text.strip() for text in line.split("|")] for line in captured.out.splitlines()]
    shown = next(line[3:9] for line in lines if line[1:3] == ["m_sct", "baechi m_sct"])
    assert shown == ["1", "1", "1", "1", f"{ratio:.3f}", str(int(ratio < 1))]
    reference_comparison.main([*options, "--cases=layered-20-1-2"])
    assert capsys.readouterr().err == ""
    with pytest.raises(SystemExit, match="give the same options or another --out"):
        reference_comparison.main([*options, "--cases=layered-20-1-2", "--baechi_version=another"])


def test_a_folder_without_the_placers(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"has no placer/placer_lib\.py; give --baechi the folder of a checkout of github\.com/"):
        reference_comparison.main([f"--baechi={tmp_path}"])
    with pytest.raises(SystemExit, match=r"has no baechi_core/placer/m_sct\.py; give --baechi_torch the folder"):
        reference_comparison.main([f"--baechi_torch={tmp_path}"])
    with pytest.raises(SystemExit, match="name a checkout"):
        reference_comparison.main([])


def test_what_a_placement_is_worth() -> None:
    graph = OpGraph.from_edges([Op("a", compute_us=1), Op("b", compute_us=5), Op("c", compute_us=5)], [("a", "c", 1, "")])
    cluster = Cluster.uniform(2, link=Link(0.0, 1.0), memory_bytes=1)
    # Without priorities a comes first, since c waits for it; with these b does.
    assert reference_comparison.worth(graph, cluster, [0, 0, 1], [1, 0, 2]) == {"status": "feasible", "makespan_us": 7, "priorities": False}
    assert reference_comparison.worth(graph, cluster, [0, 0, 1], [0, 1, 2])["makespan_us"] == 7
    heavy = graph.replace_ops([Op("a", compute_us=1, persistent_bytes=2), *graph.ops[1:]])
    cell = reference_comparison.worth(heavy, cluster, [0, 0, 1], [1, 0, 2])
    assert (cell["status"], cell["without_limits_us"]) == ("over memory", 7)
    assert "makespan_us" not in cell


def test_what_the_releases_have_no_words_for() -> None:
    devices = Device("x", None, 1.0), Device("y", None, 2.0)
    assert reference_comparison.inexpressible(Cluster(devices)) == "unequal speeds"
    two = Device("x"), Device("y")
    assert reference_comparison.inexpressible(Cluster(two, Link(1.0), {("x", "y"): Link(2.0)})) == "unequal links"
    assert reference_comparison.inexpressible(Cluster(two, Link(1.0), parallel_transfers=True)) == "parallel transfers"
    assert reference_comparison.inexpressible(Cluster(two, Link(1.0, receive_us=3.0))) == "costs of sending and receiving"
    assert reference_comparison.inexpressible(Cluster(two, Link(1.0))) is None


def test_the_stand_in_for_the_solver() -> None:
    """Maximise x + y with x + 2 y <= 4, 3 x + y <= 6: at (8/5, 6/5)."""
    left = (1, 2, 3, 1), (0, 0, 1, 1), (0, 1, 0, 1)
    assert solve_lp([-1.0, -1.0], left, [4.0, 6.0], "mosek")["x"] == pytest.approx([1.6, 1.2])
    with pytest.raises(RuntimeError, match="HiGHS instead of mosek"):
        solve_lp([-1.0, -1.0], ((1,), (0,), (0,)), [4.0], "mosek")


def test_the_lp_of_a_random_order_of_entries_is_the_same() -> None:
    rng = np.random.default_rng(0)
    left = [(3, 0, 0), (1, 1, 0), (1, 0, 1), (4, 1, 1), (-1, 2, 0), (-1, 3, 1)]
    for _ in range(5):
        rng.shuffle(left)
        found = solve_lp([-2.0, -1.0], tuple(zip(*left, strict=True)), [9.0, 8.0, 0.0, 0.0], "mosek")["x"]
        assert found == pytest.approx([28 / 11, 15 / 11])


def test_ops_that_the_release_dropped() -> None:
    ops = [Op("a", compute_us=5), Op("b", compute_us=1), Op("c", compute_us=1, colocation="g"), Op("d", compute_us=9, colocation="g")]
    graph = OpGraph.from_edges([*ops, Op("e", compute_us=2)], [("a", "d", 1, "")])
    assert completed(graph, 2, {0: 0, 3: 1}) == [0, 0, 1, 1, 0]
    assert priorities(graph, [("3", "1"), ("0",)]) == [2, 0, 3, 1, 4]


def test_the_graph_for_the_torch_release() -> None:
    ops = [OPS[0], Op("b", compute_us=20), Op("c", compute_us=30)]
    plain = OpGraph.from_edges(ops, [("a", "b", 4, "x"), ("a", "c", 4, "x"), ("a", "c", 3, "y")])
    graph = release.module_graph(plain, CLUSTER)
    assert graph.nodes[0]["weight"] == 10
    memory = {key: graph.nodes[0][key] for key in ("parameter_mem", "permanent_mem", "temporary_mem", "peak_mem")}
    assert memory == {"parameter_mem": 5, "permanent_mem": 12, "temporary_mem": 4, "peak_mem": 16}
    assert graph.edges[0, 2]["tensor"] == {"name": "1", "transfer_time": 2 * 4.0 + 7 * 0.5, "bytes": 7}
    devices = release.device_graph(CLUSTER)
    assert [devices.nodes[i]["memory_limit"] for i in devices] == [1000, 1000]


def test_flags_keep_their_defaults() -> None:
    flags = release.Flags()
    flags.DEFINE_boolean("fast", False, "help")
    flags.DEFINE_enum("grouper", "tf", ["tf", "coplace"], "help")
    assert vars(flags.FLAGS) == {"fast": False, "grouper": "tf"}
