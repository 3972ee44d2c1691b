"""The library's front door: plans as values, what is asked of them, and what they run."""

import contextlib
import json
import re
import sys
from dataclasses import replace
from html import escape
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn

import baechi_ext
from baechi_ext.cost.hardware import COUNTED
from baechi_ext.errors import CaptureError, ClusterError, InfeasibleError, MismatchError, OptionError
from baechi_ext.ir.op_graph import PHASES
from baechi_ext.simulate import simulate
from baechi_runtime.report.palette import DEVICES
from baechi_runtime.torch.calls.optimizers import optimizer_slots
from tests.build import cluster_of, graph_of
from tests.runtime import forked
from tests.test_layers import ROOT

GRAPH = ROOT / "baechi_ext" / "datasets" / "graphs" / "nmt" / "graph_00.json.gz"


class Mixture(nn.Module):
    """A few experts of the same input."""

    def __init__(self, experts: int = 2) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1)) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([expert(x) for expert in self.experts], dim=1).sum(dim=1)


@pytest.fixture(scope="module")
def graph() -> baechi_ext.OpGraph:
    return baechi_ext.OpGraph.load(GRAPH)


@pytest.fixture(scope="module")
def run(graph: baechi_ext.OpGraph) -> baechi_ext.Run:
    return baechi_ext.plan(graph, devices=4, method="m_etf")


def commanded(*words: object) -> dict:
    """The JSON that a command prints."""
    return json.loads(forked.output(*map(str, words), "--json"))


# A graph


def test_a_plan_is_what_the_command_makes_and_what_it_simulates_to(run: baechi_ext.Run, graph: baechi_ext.OpGraph, tmp_path: Path) -> None:
    planned = commanded("place", GRAPH, "--num_devices=4", "--placement_method=m_etf")
    assert (run.step_us, run.bound_us, list(run.peak_memory_bytes)) == tuple(
        planned[name] for name in ("predicted_step_us", "lower_bound_us", "peak_memory_bytes")
    )
    assert dict(zip(graph.index, run.plan.placement, strict=True)) == planned["placement"]
    assert simulate(graph, run.cluster, run.plan.placement, run.plan.priority).makespan_us == run.step_us
    assert run.speedup == pytest.approx(graph.total_compute_us() / run.step_us)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("num_devices = 2\n")
    run.save(tmp_path / "run")
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"graph.json", "plan.json"}
    simulated = commanded("simulate", tmp_path / "run" / "graph.json", tmp_path / "run" / "plan.json")
    assert (simulated["makespan_us"], simulated["violations"]) == (run.step_us, [])
    assert commanded("explain", tmp_path / "run")["step_us"] == run.step_us == run.explain().findings.to_json()["step_us"]
    assert "lstm" in run.report(tmp_path / "run").read_text()
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.parametrize(("speeds", "times"), [((0.5, 1.0, 1.0, 1.0), 1), ((0.5, 0.25, 0.5, 0.5), 2)])
def test_the_speedup_is_over_the_fastest_device(run: baechi_ext.Run, speeds: tuple[float, ...], times: float) -> None:
    slower = run.what_if(devices=run.cluster.each_with("speed", speeds))
    assert slower.single_us == times * run.single_us
    assert slower.speedup == slower.single_us / slower.step_us


def test_one_device_is_the_fastest_of_a_run_and_the_first_of_what_runs(one_thread: None) -> None:
    """A plan that runs has its program on the first device run beside it, which the report then says."""
    model, x = Mixture(), torch.randn(16, 32)
    slower = baechi_ext.Cluster((baechi_ext.Device("cpu:0", speed=0.5), baechi_ext.Device("cpu:1")), baechi_ext.Link(latency_us=1.0))
    run = baechi_ext.plan(model, (x,), devices=slower, method="round_robin")
    said = "'one device' is cpu:0, the first; cpu:1 is 2 times as fast"
    assert said not in run.notes
    run.apply(keep_placed=True, verify_steps=0)
    report = baechi_ext.report(model)
    baechi_ext.unplace(model)
    assert report.single.makespan_us == pytest.approx(2 * run.single_us)
    assert said in report.notes


def test_what_is_pinned_stays_there_and_the_run_is_as_it_was(run: baechi_ext.Run, tmp_path: Path) -> None:
    before = run.plan
    pinned = run.pin("lstm*", "device:3").pin("input_0", 1)
    where = {op.id: device for op, device in zip(pinned.graph.ops, pinned.plan.placement, strict=True)}
    assert {device for id_, device in where.items() if id_.startswith("lstm")} == {3}
    assert where["input_0"] == 1
    assert run.plan is before
    assert str(pinned.explain("lstm")).startswith("lstm is on device:3: pinned to device:3.")
    pinned.save(tmp_path)
    assert commanded("explain", tmp_path, "lstm")["pin"] == 3


def test_what_if_on_hardware_that_is_not_here() -> None:
    """Four layers of 67 GFLOP one after the other: as the data sheet has them, longer by a measured factor."""
    chain = graph_of(dict.fromkeys("abcd", 1000.0), ("a", "b", 8), ("b", "c", 8), ("c", "d", 8))
    graph = chain.replace_ops([replace(op, flop=67_000_000_000, moved_bytes=8) for op in chain.ops])
    here = baechi_ext.plan(graph, devices=2, method="m_etf")
    there = here.what_if(devices=8, hardware="h100")
    assert len(there.cluster) == 8 and {device.memory_bytes for device in there.cluster.devices} == {80 * 10**9}
    assert there.step_us == pytest.approx(4 * 1000.0 * COUNTED.middle, rel=0.05)
    said = "\n".join(there.notes)
    assert "planned for: 8 x h100, not run" in said and "no step on a GPU was compared" in said and "verdict: do not split" in said
    assert here.step_us == 4000.0
    named = baechi_ext.plan(graph, devices="8xh100", method="m_etf")
    assert (named.cluster, named.graph, named.step_us, named.notes) == (there.cluster, there.graph, there.step_us, there.notes)
    assert [device.name for device in baechi_ext.plan(graph, devices="h100").cluster.devices] == ["h100:0", "h100:1"]
    with pytest.raises(OptionError, match="has a cluster of its own"):
        here.what_if(devices=here.cluster, hardware="h100")
    with pytest.raises(OptionError, match="devices='4' is not a number of devices"):
        here.what_if(devices="4", hardware="h100")
    with pytest.raises(OptionError, match="unknown hardware 'b300'"):
        here.what_if(hardware="b300")


def test_hardware_that_is_not_here_is_split_for_more_than_hardly_anything(tmp_path: Path) -> None:
    """Two ops, of which the second is 2% of the step: as for measured costs, less than 5% is no reason to split."""
    two = graph_of({"a": 1000.0, "b": 20.0})
    graph = two.replace_ops([replace(op, flop=flop, moved_bytes=8) for op, flop in zip(two.ops, (67_000_000_000, 10**9), strict=True)])
    run = baechi_ext.plan(graph, devices="2xh100")
    assert run.plan.placement == (0, 0)
    assert "verdict: do not split" in "\n".join(run.notes)
    graph.save(tmp_path / "graph.json")
    assert commanded("place", tmp_path / "graph.json", "--hardware=h100", "--num_devices=2")["placement"] == {"a": 0, "b": 0}
    assert baechi_ext.plan(graph, devices=2).plan.placement == (0, 1)


def test_a_cluster_may_be_in_a_file(tmp_path: Path) -> None:
    cluster = cluster_of(3, memory_bytes=1000)
    (tmp_path / "cluster.json").write_text(json.dumps(cluster.to_json()))
    assert baechi_ext.plan(graph_of({"a": 1.0}), devices=str(tmp_path / "cluster.json")).cluster == cluster


def test_further_devices_have_the_links_of_the_last() -> None:
    """The fourth and fifth are to the others as the third, and to it and each other as it is to the second."""
    near, out, back = baechi_ext.Link(1e-4), baechi_ext.Link(2e-4), baechi_ext.Link(3e-4)
    names = [f"device:{i}" for i in range(5)]
    pairs = {(names[0], names[1]): near, (names[1], names[0]): near, (names[2], names[0]): out, (names[1], names[2]): back}
    cluster = baechi_ext.Cluster(tuple(map(baechi_ext.Device, names[:3])), baechi_ext.Link(9e-4), pairs)
    wider = baechi_ext.plan(graph_of({"a": 1.0}), devices=cluster).what_if(devices=5).cluster
    expected = {**pairs, **{(names[i], names[0]): out for i in (3, 4)}, **{(names[1], names[i]): back for i in (3, 4)}}
    assert wider.pairs == expected | {(names[i], names[j]): back for i in range(2, 5) for j in range(i + 1, 5)}
    fewer = baechi_ext.plan(graph_of({"a": 1.0}), devices=cluster).what_if(devices=2).cluster
    assert fewer.pairs == {ends: link for ends, link in pairs.items() if names[2] not in ends}


def test_what_if_is_the_step_planned_for_another_cluster(run: baechi_ext.Run) -> None:
    other = run.what_if(devices=8, link="25GB/s")
    assert [device.name for device in other.cluster.devices] == [f"device:{i}" for i in range(8)]
    assert (other.cluster.default.us_per_byte, other.cluster.default.latency_us) == (1e6 / 25e9, run.cluster.default.latency_us)
    assert simulate(other.graph, other.cluster, other.plan.placement, other.plan.priority).makespan_us == other.step_us
    assert [device.memory_bytes for device in run.what_if(devices=1, device_memory="1GiB").cluster.devices] == [2**30]
    with pytest.raises(InfeasibleError):
        run.what_if(device_memory="1KB")


def test_a_links_speed_is_all_that_a_byte_takes() -> None:
    """Devices bear most of a link between processes: they copy."""
    probed = baechi_ext.Cluster.uniform(2, link=baechi_ext.Link(0.1, 5.0, 1.0, 0.4, 2.0, 0.3))
    run = baechi_ext.plan(graph_of({"a": 1.0}), devices=probed, method="single")
    link = run.what_if(link="10MB/s").cluster.default
    assert [link.us_per_byte, link.send_us_per_byte, link.receive_us_per_byte] == pytest.approx([0.0125, 0.05, 0.0375])
    assert (link.latency_us, link.send_us, link.receive_us) == (5.0, 1.0, 2.0)
    free = baechi_ext.plan(graph_of({"a": 1.0}), devices=baechi_ext.Cluster.uniform(2, link=baechi_ext.Link()), method="single")
    assert free.what_if(link="10MB/s").cluster.default == baechi_ext.Link(us_per_byte=0.1)


def test_links_of_one_device_have_to_be_given() -> None:
    """A speed in bytes alone is not enough: transfers would start in no time."""
    alone = baechi_ext.plan(graph_of({"a": 1.0}), devices=baechi_ext.Cluster((baechi_ext.Device("cpu:0"),)))
    for link in (None, "25GB/s"):
        with pytest.raises(OptionError, match="no link was measured, and 2 devices need one; give .* link=baechi_ext.Link"):
            alone.what_if(devices=2, link=link)
    link = baechi_ext.Link(1e-4, 50.0)
    assert alone.what_if(devices=2, link=link).cluster.default == link
    assert len(alone.what_if(device_memory="1GiB").cluster) == 1


def test_devices_that_are_added_are_like_the_last(graph: baechi_ext.OpGraph) -> None:
    kinds = (baechi_ext.Device("gpu:1", 2**40, 2.0), baechi_ext.Device("gpu:0", 2**41, 1.0))
    run = baechi_ext.plan(graph, devices=baechi_ext.Cluster(kinds), method="single").what_if(devices=3)
    assert run.cluster.devices == (*kinds, baechi_ext.Device("gpu:2", 2**41, 1.0))


def test_methods_beside_each_other_by_simulation(run: baechi_ext.Run) -> None:
    compared = run.compare("m_etf", "single")
    assert compared["m_etf"] is run
    assert compared["single"].step_us == pytest.approx(run.graph.total_compute_us())
    assert compared.best is min(compared.values(), key=lambda one: one.step_us)
    rows = [line.split()[0] for line in repr(compared).splitlines()]
    assert rows == ["method", *compared]
    page = ElementTree.fromstring(compared._repr_html_())
    assert [cell.text for cell in page.iter("td")][:3] == ["m_etf", f"{run.step_us / 1000:.4g} ms", f"{run.speedup:.2f}"]


def test_methods_that_have_no_plan_say_why() -> None:
    graph = graph_of({"a": 1.0, "b": 1.0}, persistent_bytes={"a": 60, "b": 60})
    run = baechi_ext.plan(graph, devices=cluster_of(2, memory_bytes=100), method="m_etf")
    compared = run.compare("single", "m_etf")
    assert list(compared) == ["m_etf"]
    assert "single: " in repr(compared)
    assert "memory" in compared.refusals["single"] or "bytes" in compared.refusals["single"]


def test_a_method_whose_package_is_not_here_leaves_the_others_their_rows(run: baechi_ext.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pymetis", None)
    compared = run.compare("metis", "m_etf")
    assert list(compared) == ["m_etf"]
    assert "pip install pymetis" in compared.refusals["metis"]
    with pytest.raises(OptionError, match="unknown method 'm_et'"):
        run.compare("metis", "m_et")


# A cell of a notebook


def test_a_cell_has_the_numbers_and_bars_as_long_as_devices_work(run: baechi_ext.Run) -> None:
    html = run._repr_html_()
    page = ElementTree.fromstring(html)
    said = "".join(page.itertext())
    assert f"{run.speedup:.2f} over one device" in said
    assert f"{run.step_us / 1000:.4g} ms" in said
    for device, row in enumerate(page.iter("g")):
        bars = [path.get("d") for path in row.iter("path") if path.get("fill") == DEVICES[device]]
        painted = sum(float(width) for bar in bars for width in re.findall(r"z|h(\d[\d.]*)", bar) if width)
        assert painted / 600 == pytest.approx(run.timeline.busy_us[device] / run.timeline.makespan_us, abs=0.05)
    assert len(html) < 20_000


def test_a_cell_is_read_on_light_and_dark_ground(run: baechi_ext.Run) -> None:
    """No colour is set but those of devices, which are not of the ground."""
    html = run._repr_html_() + run.compare("m_etf", "single")._repr_html_()
    assert set(re.findall(r"#[0-9a-f]{3,8}", html)) <= set(DEVICES)
    assert set(re.findall(r'fill="([^"]*)"', html)) <= {*DEVICES, "currentColor"}
    assert "background" not in html
    assert not re.search(r"[^-]color:(?!inherit)", html)


def test_names_are_text_and_large_graphs_small() -> None:
    costs = {f"<b>{i}</b>": 1.0 for i in range(20_000)}
    cluster = baechi_ext.Cluster(tuple(baechi_ext.Device(f"<i>&{d}") for d in range(20)))
    run = baechi_ext.plan(graph_of(costs), devices=cluster, method="contiguous")
    page = ElementTree.fromstring(run._repr_html_())
    assert len(run._repr_html_()) < 40_000
    assert [text.text for text in page.iter("text")][:2] == ["<i>&0", "<i>&1"]
    assert "4 more devices" in "".join(page.itertext())
    assert "\n" not in repr(run)
    assert len(repr(run)) < 300
    assert {op.phase for op in run.graph.ops} <= set(PHASES)


# A module


@pytest.fixture(scope="module")
def planned() -> tuple[Mixture, Tensor, baechi_ext.Run]:
    torch.compiler.reset()
    torch.manual_seed(0)
    model, x = Mixture(), torch.randn(16, 32)
    return model, x, baechi_ext.plan(model, (x,), devices=2, method="round_robin", device_memory="2GiB")


def test_planning_a_module_leaves_it_as_it_was(one_thread: None) -> None:
    model, x = Mixture().eval(), torch.randn(16, 32)
    state, random = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    run = baechi_ext.plan(model, {"x": x}, devices=2, method="m_etf")
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert (model.training, [p.grad for p in model.parameters()]) == (False, [None] * 8)
    with pytest.raises(OptionError, match="not placed"):
        baechi_ext.report(model)
    assert {op.module for op in run.graph.ops} >= {"experts.0.0", "experts.1.2"}
    assert "no optimizer of its parameters was found" in run.notes[-1]


def test_what_an_optimizer_of_the_users_own_keeps_is_not_known_whatever_it_is_called() -> None:
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    held = torch.optim.AdamW(weights[:1]), type("AdamW", (torch.optim.Optimizer,), {})(weights[1:], {"lr": 0.1})
    assert [len(o.param_groups) for o in held] == [1, 1]
    assert optimizer_slots(weights[:1]) == (2, "")
    assert optimizer_slots(weights) == (0, "what AdamW keeps for each parameter is not known, so no memory is planned for it")


def test_a_module_runs_by_the_plan_that_was_pinned(planned: tuple[Mixture, Tensor, baechi_ext.Run], one_thread: None) -> None:
    model, x, run = planned
    pinned = run.pin("experts.0", 0).pin("experts.1", 1)
    model(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    assert pinned.apply(keep_placed=True) is model
    try:
        assert baechi_ext.report(model).plan.placement == pinned.plan.placement
        assert len(notes := baechi_ext.report(model).notes) == len(set(notes)) > 0
        model(x).sum().backward()
        assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))
        assert baechi_ext.report(model).placed_steps >= 2
        with pytest.raises(OptionError, match="placed already"):
            run.apply()
    finally:
        baechi_ext.unplace(model)


def test_a_plan_for_more_devices_runs_on_more(planned: tuple[Mixture, Tensor, baechi_ext.Run], one_thread: None) -> None:
    model, x, run = planned
    wide = run.what_if(devices=3)
    wide.apply(keep_placed=True, verify_steps=0)
    report = baechi_ext.report(model)
    baechi_ext.unplace(model)
    assert report.devices == ("cpu:0", "cpu:1", "cpu:2")
    assert (set(report.plan.placement), report.plan.placement) == ({0, 1, 2}, wide.plan.placement)


def test_layers_that_are_put_into_eval_mode_are_planned_so_and_stay_so(one_thread: None) -> None:
    """A BatchNorm that is frozen in a model that trains, as for fine-tuning."""
    model, x = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Dropout(), nn.Linear(64, 1)), torch.randn(16, 32)
    model[1].eval()
    modes = [module.training for module in model.modules()]
    for place in (baechi_ext.plan, baechi_ext.parallelize):
        place(model, (x,), devices=2, method="round_robin")
        assert [module.training for module in model.modules()] == modes
        assert model[1].num_batches_tracked == 0
    baechi_ext.unplace(model)


class Growing(nn.Module):
    """Keeps the mean of each batch that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 1)
        self.register_buffer("seen", torch.zeros(1, 32))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, x.mean(0, keepdim=True)])
        return self.layer(x - self.seen[-1])


def test_a_buffer_that_a_call_replaces_is_the_one_it_was() -> None:
    model = Growing()
    seen = model.seen
    with contextlib.suppress(CaptureError):
        baechi_ext.plan(model, (torch.randn(16, 32),), devices=2, method="round_robin")
    assert model.seen is seen and seen.shape == (1, 32)


def test_a_module_is_planned_for_hardware_and_left_as_it_was(one_thread: None) -> None:
    model, x = Mixture(), torch.randn(16, 32)
    there = baechi_ext.plan(model, (x,), devices="h100", pins=["experts.0=1"], method="m_etf")
    assert {there.plan.placement[v] for v, op in enumerate(there.graph.ops) if (op.module or "").startswith("experts.0")} == {1}
    assert there.step_us > 10 * sum(op.phase == "forward" for op in there.graph.ops) / 2
    with pytest.raises(OptionError, match="there is no code of it to run"):
        there.apply()


def test_a_module_is_measured_by_several_methods(planned: tuple[Mixture, Tensor, baechi_ext.Run], one_thread: None) -> None:
    model, _, run = planned
    before = [p.grad for p in model.parameters()]
    compared = run.what_if(device_memory="1GiB").compare("round_robin", measure=True)
    assert [device.memory_bytes for device in compared["round_robin"].cluster.devices] == [2**30] * 2
    assert compared.measured is not None
    assert compared.measured.measured == ("single", "round_robin")
    assert set(compared) == {"single", "round_robin"}
    assert compared["round_robin"].plan.placement == run.plan.placement
    assert repr(compared).startswith(compared.measured.recommendation())
    assert all(p.grad is grad for p, grad in zip(model.parameters(), before, strict=True))


def test_a_plan_of_what_the_module_was_is_not_run(one_thread: None) -> None:
    model, x = Mixture(), torch.randn(16, 32)
    run = baechi_ext.plan(model, (x,), devices=2, method="round_robin")
    model.experts[1] = nn.Linear(32, 1)
    with pytest.raises(MismatchError, match="other ops than the plan"):
        run.apply(keep_placed=True)
    with pytest.raises(OptionError, match="not placed"):
        baechi_ext.report(model)


# A built-in model


def test_a_model_is_planned_and_its_step_measured() -> None:
    sizes, how = {"image_size": 8, "batch_size": 2}, {"method": "m_etf", "optimizer": "adam"}
    run = baechi_ext.plan("wide_towers", sizes, devices=2, device_memory="2GiB", **how)
    assert {op.phase for op in run.graph.ops} == set(PHASES)
    pinned = run.pin("towers.0*", 1)
    report = pinned.apply(num_steps=2)
    assert report.result.plan.placement == pinned.plan.placement
    assert report.parity.passed
    assert re.match(r"\S+ times as fast as|Inconclusive: ", repr(report))
    compared = run.what_if(device_memory="1GiB").compare("round_robin", measure=True)
    assert [device.memory_bytes for device in compared["round_robin"].cluster.devices] == [2**30] * 2
    assert set(compared.measured.measurement.samples) == {"eager", "single", "round_robin"}
    assert compared.best in compared.values()
    said, html = compared.measured.recommendation(), compared._repr_html_()
    assert repr(compared).startswith(said)
    assert html.index(escape(said)) < html.index("<table")


def test_a_model_is_planned_for_hardware_without_its_weights() -> None:
    there = baechi_ext.plan("wide_towers", {"image_size": 8, "batch_size": 2}, devices="3xa100", method="m_etf")
    assert [device.name for device in there.cluster.devices] == ["a100:0", "a100:1", "a100:2"]
    assert {op.phase for op in there.graph.ops} == set(PHASES)
    assert "planned for: 3 x a100, not run" in there.notes


# What can't be


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda: baechi_ext.plan(graph_of({"a": 1.0})).apply(), "there is no code of it to run"),
        (lambda: baechi_ext.plan(graph_of({"a": 1.0})).explain("b"), "'b' matches nothing"),
        (lambda: baechi_ext.plan(graph_of({"a": 1.0})).compare(measure=True), "there is no code of it to run"),
        (lambda: baechi_ext.plan(graph_of({"a": 1.0}), devices="h200"), "devices='h200' is no cluster file and no published hardware"),
        (lambda: baechi_ext.plan(graph_of({"a": 1.0})).what_if(link="fast"), "link='fast' is not a speed; write it like '25GB/s'"),
        (lambda: baechi_ext.plan(graph_of({"a": 1.0})).what_if(link="0GB/s"), "is not a speed"),
        (lambda: baechi_ext.plan(graph_of({"a": 1.0})).what_if(devices=0), "devices=0 is not a number of devices"),
        (lambda: baechi_ext.plan(graph_of({"a": 1.0})).what_if(devices="8"), "devices='8' is not a number of devices; give 1 to 1024"),
        (lambda: baechi_ext.plan(graph_of({"a": 1.0})).what_if(devices=8.0), "devices=8.0 is not a number of devices"),
        (lambda: baechi_ext.plan(graph_of({"a": 1.0})).what_if(devices="8xh100"), "or a baechi_ext.Cluster; or .* hardware='h100'$"),
        (lambda: baechi_ext.plan(graph_of({"a": 1.0})).what_if(link=25), "link=25 is not a speed"),
        (lambda: baechi_ext.plan(graph_of({"a": 1.0})).what_if(device_memory=-1), "device_memory is -1; expected at least 1"),
        (lambda: baechi_ext.plan(graph_of({"a": 1.0})).what_if(device_memory=0.5), "device_memory is 0.5; expected at least 1"),
        (lambda: baechi_ext.plan(graph_of({"a": 1.0})).what_if(device_memory="0.5"), "device_memory: '0.5' is less than a byte"),
        (lambda: baechi_ext.plan(graph_of({"a": 1.0})).pin(None, 0), "matches nothing"),
        (lambda: baechi_ext.plan(graph_of({"a": 1.0}), devices="cuda:0"), "devices='cuda:0' is no cluster file"),
        (lambda: baechi_ext.plan(graph_of({"a": 1.0}), devices=True), "devices=True is not a number of devices"),
        (lambda: baechi_ext.plan(graph_of({"a": 1.0}), devices=10**6), "devices=1000000 is not a number of devices"),
        (lambda: baechi_ext.plan(graph_of({"a": 1.0}), devices=[0, 1]), "a device's name is 0; expected a text"),
        (lambda: baechi_ext.plan(graph_of({"a": 1.0}), pins=[("a", 1)]), "is not a pin"),
        (lambda: baechi_ext.plan(graph_of({"a": 1.0}), pins="a=1"), "pins='a=1' is no list; write one"),
        (lambda: baechi_ext.plan(graph_of({"a": 1.0}), pins=1), "pins=1 is no list"),
        (lambda: baechi_ext.plan(graph_of({"a": 1.0}), seed="x"), "seed='x' is not a whole number"),
        (lambda: baechi_ext.plan(graph_of({"a": 1.0}), seed=-1), "seed=-1 is not a whole number from 0 to 9007199254740992"),
        (lambda: baechi_ext.plan(graph_of({"a": 1.0}), seed=2**53 + 1), "is not a whole number from 0 to"),
        (lambda: baechi_ext.plan(graph_of({"a": 1.0}), seed=True), "seed=True is not a whole number"),
        (lambda: baechi_ext.plan(graph_of({"a": 1.0}), time_limit="10"), "time_limit is '10'; expected a number"),
        (lambda: baechi_ext.plan(graph_of({"a": 1.0})).what_if(device_memory="much"), "device_memory: 'much' is not a size"),
        (lambda: baechi_ext.plan(graph_of({"a": 1.0})).compare("best"), "unknown method 'best'"),
        (lambda: baechi_ext.plan(graph_of({"a": 1.0}), (1,)), "a graph has no inputs"),
        (lambda: baechi_ext.plan(graph_of({"a": 1.0}), speed=1), "unknown option 'speed' of plan.. for a graph"),
        (lambda: baechi_ext.plan("nonesuch"), "unknown model 'nonesuch'"),
        (lambda: baechi_ext.plan("alexnet", {"size": 1}), "'size'; known are batch_size, "),
        (lambda: baechi_ext.plan("alexnet", 8), "not a int"),
        (lambda: baechi_ext.plan("alexnet", {"batch_size": "8"}), "the sizes of alexnet: Expected .int.*, got .str. - at .*batch_size"),
        (lambda: baechi_ext.plan("alexnet", {"batch_size": 0}), "the sizes of alexnet: Expected `int` >= 1 - at .*batch_size"),
        (lambda: baechi_ext.plan("gnmt_v2", {"num_layers": -1}), "the sizes of gnmt_v2: Expected `int` >= 1 - at .*num_layers"),
        (lambda: baechi_ext.plan("alexnet", {"dropout": 7}), "the sizes of alexnet: Expected `float` <= 1.0 - at .*dropout"),
        (lambda: baechi_ext.log(None, None), "log takes the report of a placed module"),
        (lambda: baechi_ext.unplace(5), "unplace takes an nn.Module, not a int"),
        (lambda: baechi_ext.plan(nn.Linear(1, 1)), r"plan\(Linear\) needs the inputs of a training call"),
        (lambda: baechi_ext.plan(nn.Linear(1, 1), (1,), link="1GB/s"), "unknown option 'link' of plan.. for a module"),
        (lambda: baechi_ext.plan(nn.Linear(1, 1), (1,), devices=["a"]), "devices=.'a'. are no devices of PyTorch; name them as 'cuda:0'"),
        (lambda: baechi_ext.plan(nn.Linear(1, 1), (1,), devices="cuda:0"), "devices='cuda:0' is no cluster file"),
        (lambda: baechi_ext.plan(nn.Linear(1, 1), (1,), device_memory=1e400), "device_memory is inf; expected a finite number"),
        (lambda: baechi_ext.plan(3), "takes an nn.Module, a TensorFlow step, the name of a built-in model or an OpGraph, not a int"),
        (lambda: baechi_ext.nonesuch, "has no attribute 'nonesuch'"),
    ],
)
def test_what_can_not_be_says_what_can(ask: object, said: str) -> None:
    with pytest.raises((OptionError, ClusterError, AttributeError), match=said):
        ask()
