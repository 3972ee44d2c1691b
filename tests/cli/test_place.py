"""`baechi place`: every method, what it writes and what it prints."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networkx as nx
import pytest

from baechi_ext.group.registry import GROUPERS, PLACER_TYPES
from baechi_ext.ir import Cluster, OpGraph, Plan
from baechi_ext.place.registry import METHODS
from baechi_ext.place.traversal import TRAVERSALS
from baechi_ext.simulate import simulate
from baechi_runtime.cli.main import main
from tests.cli.files import ROOT, a_graph, write

Run = Callable[..., tuple[int, str, str]]


def towers() -> dict[str, Any]:
    """A training graph of three equal towers with a shared input and loss, forward and backward."""
    nodes: list[dict[str, Any]] = [{"id": "x", "compute_us": 5}]
    edges = []
    for tower in range(3):
        chain = ["x", *(f"f{tower}.{i}" for i in range(4)), "loss"]
        back = ["loss", *(f"b{tower}.{i}" for i in reversed(range(4)))]
        nodes += [{"id": v, "compute_us": 100, "colocation": v[1:], "persistent_bytes": 50, "expert": tower} for v in chain[1:-1]]
        nodes += [
            {"id": v, "compute_us": 200, "colocation": v[1:], "phase": "backward", "forward_op": "f" + v[1:]} for v in back[1:]
        ]
        edges += [*zip(chain, chain[1:], strict=False), *zip(back, back[1:], strict=False)]
        edges += [(f"f{tower}.{i}", f"b{tower}.{i}") for i in range(4)]
    nodes.append({"id": "loss", "compute_us": 5})
    return {"nodes": nodes, "edges": [{"source": s, "target": d, "bytes": 100} for s, d in edges]}


@pytest.fixture
def big(tmp_path: Path) -> Path:
    return write(tmp_path / "towers.json", towers())


def check_plan(graph_path: Path, plan_path: Path, num_devices: int) -> Plan:
    """The plan in a file, after what any plan file must hold has been checked."""
    graph = OpGraph.load(graph_path)
    plan = Plan.load(plan_path, graph)
    assert set(json.loads(plan_path.read_text())["placement"]) == set(graph.index)
    assert len(plan.cluster) == num_devices
    for members in graph.groups.values():
        assert len({plan.placement[v] for v in members}) == 1
    timeline = simulate(graph, plan.cluster, plan.placement, plan.priority)
    assert timeline.makespan_us == pytest.approx(plan.predicted_step_us)
    assert timeline.peak_memory_bytes == plan.peak_memory_bytes
    assert plan.lower_bound_us <= plan.predicted_step_us
    return plan


@pytest.mark.parametrize("method", METHODS)
def test_every_method(run: Run, big: Path, tmp_path: Path, method: str) -> None:
    out = tmp_path / "plan.json"
    cluster = ("--num_devices=3", "--device_memory=1GiB", "--comm_cost_coeffs=0.01,1")
    flags = (f"--placement_method={method}", *cluster, "--time_limit=1")
    code, shown, said = run("place", big, *flags, "--out", out)
    assert (code, "error" in said) == (0, False)
    plan = check_plan(big, out, 3)
    assert plan.method == method
    assert plan.options["grouper"] == "tf"
    assert f"method          {method} ({plan.status}, " in shown
    assert str(out) in shown
    assert sorted(tmp_path.iterdir()) == [out, big]


@pytest.mark.parametrize("placer_type", PLACER_TYPES)
@pytest.mark.parametrize("grouper", GROUPERS)
@pytest.mark.parametrize("only_forward", [(), ("--only_forward",)])
def test_every_grouping(
    run: Run, big: Path, tmp_path: Path, grouper: str, placer_type: str, only_forward: tuple[str, ...]
) -> None:
    flags = ("--placement_method=m_etf", "--num_devices=2", f"--grouper={grouper}", f"--placer_type={placer_type}", *only_forward)
    assert run("place", big, *flags, "--out", tmp_path / "plan.json")[0] == 0
    plan = check_plan(big, tmp_path / "plan.json", 2)
    assert (plan.options["grouper"], plan.options["placer_type"]) == (grouper, placer_type)
    assert plan.options["only_forward"] is bool(only_forward)


def test_json_is_a_plan_file(run: Run, big: Path, tmp_path: Path) -> None:
    code, out, _ = run("place", big, "--num_devices=2", "--json", "--out", tmp_path / "plan.json")
    value = json.loads(out)
    assert code == 0
    assert {"status", "predicted_step_us", "lower_bound_us", "peak_memory_bytes", "placement_seconds"} <= set(value)
    assert {"busy_us", "transfers"} <= set(value)
    (tmp_path / "printed.json").write_text(out)
    graph = OpGraph.load(big)
    assert Plan.load(tmp_path / "printed.json", graph) == Plan.load(tmp_path / "plan.json", graph)


def test_the_same_line_gives_the_same_plan(run: Run, big: Path) -> None:
    first, second = (json.loads(run("place", big, "--num_devices=3", "--json", "--seed=5")[1]) for _ in range(2))
    assert first.pop("placement_seconds") >= 0
    second.pop("placement_seconds")
    assert first == second


def test_one_device_is_optimal(run: Run, big: Path) -> None:
    value = json.loads(run("place", big, "--num_devices=1", "--json")[1])
    assert (value["status"], value["predicted_step_us"]) == ("optimal", 3610)


def test_the_table(run: Run, graph: Path) -> None:
    code, out, _ = run("place", graph, "--placement_method=single", "--num_devices=2", "--device_memory=1MiB")
    assert code == 0
    assert [" ".join(line.split()) for line in out.splitlines()[:-1]] == [
        "predicted step 30 us",
        "lower bound 30 us (the step is 0.0% above it)",
        "transfers 0 (0 B)",
        f"method single (optimal, {out.splitlines()[3].split()[3]} s)",
        "plan not written (no --out)",
        "device ops busy peak memory limit",
        "device:0 3 100% 34 B 1 MiB",
        "device:1 0 0% 0 B 1 MiB",
    ]


# Clusters


def cluster_of(run: Run, graph: Path, *flags: str) -> Cluster:
    code, out, err = run("place", graph, "--placement_method=single", "--json", *flags)
    assert (code, "error" in err) == (0, False), err  # a machine at work may show progress there
    return Cluster.from_json(json.loads(out)["cluster"])


@pytest.mark.parametrize(
    ("size", "memory"),
    [("16GiB", 2**34), ("800MB", 8 * 10**8), ("1.5 kb", 1500), ("5000", 5000), ("5000B", 5000), ("0.5KiB", 512), ("2TiB", 2**41)],
)
def test_device_memory(run: Run, graph: Path, size: str, memory: int) -> None:
    assert [d.memory_bytes for d in cluster_of(run, graph, "--num_devices=2", f"--device_memory={size}").devices] == [memory] * 2


def test_defaults_of_a_cluster(run: Run, graph: Path) -> None:
    cluster = cluster_of(run, graph, "--num_gpus=3")
    assert [(d.name, d.memory_bytes, d.speed) for d in cluster.devices] == [(f"device:{i}", None, 1.0) for i in range(3)]
    assert (cluster.default.us_per_byte, cluster.default.latency_us) == (0.0001754, 134)
    assert cluster.parallel_transfers is False


def test_flags_change_a_cluster_file(run: Run, graph: Path, tmp_path: Path) -> None:
    link = {"us_per_byte": 1, "latency_us": 2}
    devices = [{"name": "x", "memory_bytes": 1000, "speed": 2.0}, {"name": "y"}]
    links = {"default": link, "pairs": [{"source": "x", "target": "y", **link, "latency_us": 9}]}
    path = write(tmp_path / "c.json", {"devices": devices, "links": links, "parallel_transfers": True})
    own = cluster_of(run, graph, f"--cluster={path}")
    assert own == Cluster.load(path)
    changed = cluster_of(run, graph, f"--cluster={path}", "--memory_fraction=0.5", "--comm-cost-coeffs=3,4")
    assert [(d.memory_bytes, d.speed) for d in changed.devices] == [(500, 2.0), (None, 1.0)]
    assert (changed.default.us_per_byte, changed.default.latency_us, dict(changed.pairs)) == (3, 4, {})
    assert changed.parallel_transfers is True


def test_dashes_are_underscores(run: Run, graph: Path, tmp_path: Path) -> None:
    out = tmp_path / "a-plan-with--dashes.json"
    code, _, err = run("place", graph, "--placement-method=m_etf", "--num-devices", 2, "--device-memory", "1GB", "--out", out)
    assert (code, "error" in err) == (0, False), err  # a machine at work may show progress there
    assert Plan.load(out, OpGraph.load(graph)).method == "m_etf"


# Grouping may cost a plan; then it is dropped


def test_grouping_that_fits_nowhere_is_dropped(run: Run, tmp_path: Path) -> None:
    # b is the backward op of a. As one op of 120 bytes they fit on no device, apart they do.
    value = a_graph(a={"persistent_bytes": 60}, b={"persistent_bytes": 60, "phase": "backward", "forward_op": "a"})
    path = write(tmp_path / "g.json", value)
    flags = ("--placement_method=m_etf", "--num_devices=2", "--only_forward", "--json")
    together = json.loads(run("place", path, *flags, "--device_memory=200")[1])
    assert together["placement"]["a"] == together["placement"]["b"]
    assert together["options"]["only_forward"] is True
    code, out, err = run("place", path, *flags, "--device_memory=100")
    assert (code, "error" in err) == (0, False), err  # a machine at work may show progress there
    apart = json.loads(out)
    assert apart["placement"]["a"] != apart["placement"]["b"]
    assert apart["options"]["only_forward"] is False


# Another program's graph, and a process of its own


def test_a_networkx_graph(run: Run, tmp_path: Path) -> None:
    made = nx.gn_graph(30, seed=1).reverse()
    nx.set_node_attributes(made, 100, "compute_us")
    nx.set_edge_attributes(made, 10, "bytes")
    path = write(tmp_path / "nx.json", nx.node_link_data(made))
    assert run("place", path, "--num_devices=4", "--comm_cost_coeffs=0,1", "--time_limit=1", "--out", tmp_path / "plan.json")[0] == 0
    check_plan(path, tmp_path / "plan.json", 4)


def test_in_a_process_of_its_own_without_torch(graph: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    code = (
        "import sys\n"
        "from baechi_runtime.cli.main import main\n"
        f"code = main(['place', {str(graph)!r}, '--num_devices=2', '--out', {str(out)!r}])\n"
        f"code += main(['simulate', {str(graph)!r}, {str(out)!r}, '--json'])\n"
        "sys.exit(code or ('torch' in sys.modules and 77) or ('tensorflow' in sys.modules and 78))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, "error" in done.stderr) == (0, False)
    check_plan(graph, out, 2)


def test_an_expert_file_takes_the_place_of_the_graphs_hints(run: Run, big: Path, tmp_path: Path) -> None:
    rules = write(tmp_path / "rules.json", {"f?.0": 2, "[0-9].*": 1, "loss": 0})
    out = tmp_path / "plan.json"
    assert run("place", big, "--placement_method=expert", f"--expert_file={rules}", "--num_devices=3", "--out", out)[0] == 0
    plan = check_plan(big, out, 3)
    placed = dict(zip(OpGraph.load(big).index, plan.placement, strict=True))
    assert (placed["f0.0"], placed["b0.0"], placed["f0.1"], placed["loss"], placed["x"]) == (2, 2, 1, 0, 2)
    assert plan.options["expert_file"] == str(rules)
    code, _, said = run("place", big, f"--expert_file={rules}", "--num_devices=3")
    assert (code, "--expert_file is only for --placement_method=expert" in said) == (2, True)


def test_an_expert_without_hints(run: Run, graph: Path) -> None:
    code, _, said = run("place", graph, "--placement_method=expert", "--num_devices=2")
    assert (code, "error: the graph has no expert hints; give some with --expert_file=FILE" in said) == (2, True)
    code, _, said = run("place", graph, "--placement_method=expert", "--expert_file=/nowhere.json", "--num_devices=2")
    assert (code, "cannot read expert file '/nowhere.json'" in said) == (1, True)


def test_num_devices_wins_over_num_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "graph.json"
    path.write_text(json.dumps({"nodes": [{"id": "a", "compute_us": 1}], "edges": []}))
    for flags, count in ((["--num_devices=2", "--num_gpus=4"], 2), (["--num_gpus=4", "--num_devices=2"], 2), (["--num_gpus=4"], 4)):
        assert main(["place", str(path), *flags, "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)["cluster"]["devices"]) == count


def test_a_traversal_order(run: Run, graph: Path) -> None:
    """The three ops are dealt a, b, c in file order as by name, and the other way round from the readers on."""
    flags = ("--placement_method=round_robin", "--num_devices=3", "--json")
    plans = [json.loads(run("place", graph, *flags, *order)[1]) for order in ((), ("--traversal_order=reversed_topo",))]
    assert [plan["placement"] for plan in plans] == [{"a": 0, "b": 1, "c": 2}, {"c": 0, "b": 1, "a": 2}]
    assert [plan["options"].get("traversal_order") for plan in plans] == [None, "reversed_topo"]


@pytest.mark.parametrize("grouping", [(), ("--placer_type=colocation",), ("--cost_factor=1.5",)])
def test_an_order_chosen_by_rule_is_explained(run: Run, big: Path, grouping: tuple[str, ...]) -> None:
    """Whatever way the plan comes about, it names the order that was used, and a note says why."""
    flags = ("--num_devices=2", "--placement_method=m_topo", "--traversal_order=auto", *grouping)
    plan = json.loads(run("place", big, *flags, "--json")[1])
    order = plan["options"]["traversal_order"]
    assert order in TRAVERSALS
    assert [note.partition(": ")[0] for note in plan["notes"]] == [f"traversal order {order}"]
    same = json.loads(run("place", big, *flags, f"--traversal_order={order}", "--json")[1])
    assert same["placement"] == plan["placement"]
    assert f"  traversal order {order}: " in run("place", big, *flags)[1]
