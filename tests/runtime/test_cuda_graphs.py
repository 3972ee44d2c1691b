"""CUDA graphs of placed steps. What a graph replays needs a CUDA device; what is captured, copied and handed out does not: there a
recorder on the host takes the place of torch's."""

import json

import pytest
import torch

from baechi_ext.capture.torch_joint import Binding
from baechi_ext.ir import Cluster
from baechi_ext.simulate import Timeline, simulate
from baechi_ext.simulate.one_device import one_device_timeline
from baechi_runtime.models.training_step import EagerStep, TrainingStep
from baechi_runtime.torch.lowering.cuda_graphs import WARM_UP_STEPS, CudaRecorder
from baechi_runtime.torch.lowering.devices import cpu_devices, cuda_devices
from baechi_runtime.torch.parity import check_parity
from baechi_runtime.torch.threads.executor import PlacedStep, ThreadExecutor
from tests.runtime.replaying import HostRecorder
from tests.runtime.workers import finish, start
from tests.torch_steps import capture, make_step, scattered

STEPS = 6
needs_a_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def losses_of(executor: ThreadExecutor, step: TrainingStep) -> list[float]:
    """The losses of unplaced steps, on device 0."""

    def steps() -> list[float]:
        eager = EagerStep(step, torch.device("cpu"))
        torch.manual_seed(step.seed)
        return [eager.run().item() for _ in range(STEPS)]

    return executor.call(0, steps)


def run(placed: PlacedStep) -> list[float]:
    torch.manual_seed(placed.step.seed)
    return [placed.run()[0].item() for _ in range(STEPS)]


def plan(step: TrainingStep, num_devices: int, seed: int | None = None) -> tuple[Timeline, Binding]:
    """A plan: with a seed a scattered one, where hardly two ops follow each other; otherwise each device has a run of the captured ops."""
    graph, binding = capture(step)
    if seed is not None:
        return scattered(graph, num_devices, seed), binding
    if num_devices == 1:
        return one_device_timeline(graph), binding
    home: dict[str, int] = {}
    in_turn = [v * num_devices // len(graph) for v in range(len(graph))]
    placement = [d if op.colocation is None else home.setdefault(op.colocation, d) for op, d in zip(graph.ops, in_turn, strict=True)]
    return simulate(graph, Cluster.uniform(num_devices), placement, list(range(len(graph)))), binding


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
@pytest.mark.parametrize("num_devices", [1, 2, 3])
@pytest.mark.parametrize("name", ["branches", "tied"])
def test_steps_are_the_same_before_and_after_the_capture(name: str, num_devices: int, optimizer: str) -> None:
    step, unplaced = make_step(name, optimizer), make_step(name, optimizer)
    timeline, binding = plan(step, num_devices)
    with ThreadExecutor(cpu_devices(num_devices), 60, HostRecorder) as executor:
        placed = executor.load(timeline, binding, step)
        assert run(placed) == losses_of(executor, unplaced)
        last = unplaced.snapshot()
        assert all(torch.equal(value, last[name]) for name, value in step.snapshot().items())
        assert [g.reason for g in placed.graphed] == [""] * num_devices
        assert sum(g.graphs for g in placed.graphed) >= 1
        if num_devices == 1 and optimizer != "adam":  # whose steps are counted on the host
            (graphed,) = placed.graphed
            inputs = sum(op.op == "input" and op.id.startswith("input_") for op in timeline.graph.ops)
            assert (graphed.graphs, graphed.ops_in_graphs) == (1, len(timeline.graph) - inputs)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["branches", "tied"])
def test_scattered_plans_stay_right_however_little_of_them_is_captured(name: str, seed: int) -> None:
    step = make_step(name)
    timeline, binding = plan(step, 2, seed)
    with ThreadExecutor(cpu_devices(2), 60, HostRecorder) as executor:
        placed = executor.load(timeline, binding, step)
        assert run(placed) == losses_of(executor, make_step(name))


def test_graphs_begin_after_the_warm_up() -> None:
    step = make_step("branches")
    timeline, binding = plan(step, 1)
    with ThreadExecutor(cpu_devices(1), 60, HostRecorder) as executor:
        placed = executor.load(timeline, binding, step)
        before = HostRecorder.graphs
        for _ in range(WARM_UP_STEPS):
            placed.run()
            assert HostRecorder.graphs == before
        for _ in range(2):
            placed.run()
            assert HostRecorder.graphs == before + 1


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_parity_is_that_of_the_graphs(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that computes something else is found out."""
    step = make_step("branches", optimizer)
    timeline, binding = plan(step, 2)
    with ThreadExecutor(cpu_devices(2), 60, HostRecorder) as executor:
        parity = check_parity(executor, timeline, binding, step)
        assert parity.passed
        assert parity.max_abs_diff == 0
        monkeypatch.setattr(HostRecorder, "capture", lambda self, work: work() or (lambda: None))
        assert not check_parity(executor, timeline, binding, step).passed


def test_what_cannot_be_captured_goes_on_op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: HostRecorder, work: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(HostRecorder, "capture", refuse)
    step = make_step("tied")
    timeline, binding = plan(step, 1)
    with ThreadExecutor(cpu_devices(1), 60, HostRecorder) as executor:
        placed = executor.load(timeline, binding, step)
        assert run(placed) == losses_of(executor, make_step("tied"))
        assert placed.graphed[0].note("cuda:0") == "cuda:0: no CUDA graphs, since operation not permitted when stream is capturing"


@pytest.mark.gpu
@needs_a_device
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
@pytest.mark.parametrize("name", ["branches", "tied"])
def test_graphs_on_a_cuda_device(name: str, optimizer: str) -> None:
    step = make_step(name, optimizer)
    timeline, binding = plan(step, 1)
    with ThreadExecutor(cuda_devices(1), 60) as executor:
        expected = run(executor.load(timeline, binding, step))
    with ThreadExecutor(cuda_devices(1), 60, CudaRecorder) as executor:
        assert check_parity(executor, timeline, binding, step).passed
        placed = executor.load(timeline, binding, step)
        assert run(placed) == pytest.approx(expected, rel=1e-4)
        assert placed.graphed[0].reason == ""
        assert placed.graphed[0].graphs >= 1


@pytest.mark.gpu
@needs_a_device
def test_train_with_graphs() -> None:
    flags = ["--model_name=wide_towers", "--num_gpus=1", "--cuda_graphs", "--num_steps=5", "--placement_method=contiguous", "--json"]
    code, out, err = finish(start("train", *flags))
    assert code == 0, err
    report = json.loads(out)
    assert report["parity"]["passed"]
    assert any("CUDA graphs of" in note for note in report["notes"])
