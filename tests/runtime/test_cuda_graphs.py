"""Placed steps on streams, and as one CUDA graph. What a graph replays needs CUDA devices; the order in which all of them get their work,
what is kept until it is copied, captured and handed out, does not: there devices and a recorder on the host take the place of torch's."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baechi_ext.capture.torch_joint import Binding, CaptureOptions, capture_joint
from baechi_ext.ir import Cluster
from baechi_ext.simulate import Timeline, simulate
from baechi_ext.simulate.one_device import one_device_timeline
from baechi_runtime.measure.parity_result import Parity
from baechi_runtime.models.training_step import EagerStep, TrainingStep
from baechi_runtime.torch.lowering import updates
from baechi_runtime.torch.lowering.devices import cuda_devices
from baechi_runtime.torch.lowering.updates import optimizers_by_device
from baechi_runtime.torch.parity import Masks, check_parity, exact_results, parity_of_kernels, unplaced_results, worst_of
from baechi_runtime.torch.streams.executor import WARM_UP_STEPS, StreamExecutor, StreamStep
from baechi_runtime.torch.streams.step_graph import CudaRecorder, too_large, why_not_captured
from tests.build import graph_of
from tests.runtime.replaying import HostRecorder, host_devices
from tests.runtime.workers import finish, start
from tests.torch_steps import capture, make_step, scattered

STEPS = 6
needs_a_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def losses_of(executor: StreamExecutor, step: TrainingStep) -> list[float]:
    """The losses of unplaced steps, on device 0."""

    def steps() -> list[float]:
        eager = EagerStep(step, torch.device("cpu"))
        torch.manual_seed(step.seed)
        return [eager.run().item() for _ in range(STEPS)]

    return executor.call(0, steps)


def run(placed: StreamStep) -> list[float]:
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
@pytest.mark.parametrize("num_devices", [1, 3])
@pytest.mark.parametrize("name", ["branches", "tied"])
def test_steps_are_the_same_before_and_after_the_capture(name: str, num_devices: int, optimizer: str) -> None:
    step, unplaced = make_step(name, optimizer), make_step(name, optimizer)
    timeline, binding = plan(step, num_devices)
    with StreamExecutor(host_devices(num_devices), 60, HostRecorder) as executor:
        placed = executor.load(timeline, binding, step)
        assert run(placed) == losses_of(executor, unplaced)
        last, now = unplaced.snapshot(), placed.gather()[1]
        assert all(torch.equal(value, last[name]) for name, value in now.items())
        if optimizer == "adam":  # which has to be told to count its steps on the device, and only a CUDA device's can be
            assert placed.why_not == "Adam counts its steps on the host"
        assert placed.is_graph == (optimizer != "adam")


@pytest.mark.parametrize("recorder", [None, HostRecorder])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["branches", "tied"])
def test_scattered_plans_keep_what_is_still_copied(name: str, seed: int, recorder: type[HostRecorder] | None) -> None:
    step = make_step(name)
    timeline, binding = plan(step, 3, seed)
    assert timeline.transfers
    with StreamExecutor(host_devices(3), 60, recorder) as executor:
        placed = executor.load(timeline, binding, step)
        assert run(placed) == losses_of(executor, make_step(name))
        assert placed.is_graph == (recorder is not None)
        assert all(us > 0 for us, ops in zip(placed.run()[1].busy_us, timeline.device_order(), strict=True) if ops)


def test_the_graph_is_made_after_the_warm_up() -> None:
    step = make_step("branches")
    timeline, binding = plan(step, 2)
    with StreamExecutor(host_devices(2), 60, HostRecorder) as executor:
        placed = executor.load(timeline, binding, step)
        before = HostRecorder.graphs
        for _ in range(WARM_UP_STEPS):
            placed.run()
            assert HostRecorder.graphs == before
        for _ in range(2):
            placed.run()
            assert HostRecorder.graphs == before + 1
        assert placed.note == f"one CUDA graph of {len(timeline.graph)} ops on 2 devices"


def test_a_checkpoint_ends_a_graph_whose_optimizer_has_other_tensors(tmp_path: Path) -> None:
    step, other = make_step("tied", "momentum"), make_step("tied", "momentum")
    timeline, binding = plan(step, 2)
    with StreamExecutor(host_devices(2), 60, HostRecorder) as executor:
        placed = executor.load(timeline, binding, step)
        run(placed)
        assert placed.is_graph
        shards = placed.save(tmp_path)
        expected = run(placed)
        placed.restore(tmp_path, shards)
        assert run(placed) == expected
        assert placed.is_graph
        resumed = executor.load(timeline, binding, other)
        resumed.restore(tmp_path, shards)
        assert run(resumed) == expected


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_parity_is_that_of_the_graph(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that computes something else is found out."""
    step = make_step("branches", optimizer)
    timeline, binding = plan(step, 2)
    with StreamExecutor(host_devices(2), 60, HostRecorder) as executor:
        parity = check_parity(executor, timeline, binding, step)
        assert parity.passed
        assert parity.max_abs_diff == 0
        if optimizer == "momentum":
            monkeypatch.setattr(HostRecorder, "capture", lambda self, work: work() or (lambda: None))
            assert not check_parity(executor, timeline, binding, step).passed


def test_what_cannot_be_captured_goes_on_op_by_op_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: HostRecorder, work: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(HostRecorder, "capture", refuse)
    step = make_step("tied")
    timeline, binding = plan(step, 1)
    with StreamExecutor(host_devices(1), 60, HostRecorder) as executor:
        placed = executor.load(timeline, binding, step)
        assert run(placed) == losses_of(executor, make_step("tied"))
        ops = f"{len(timeline.graph)} ops on 1 device"
        assert placed.note == f"no CUDA graph of {ops}: operation not permitted when stream is capturing"


def test_random_numbers_of_several_devices_are_no_graph() -> None:
    step = make_step("branches")
    graph, binding = capture(step, relaxed_random=True)
    first, second = binding.seeded_ops
    placement = [int(v == second) for v in range(len(graph))]
    timeline = simulate(graph, Cluster.uniform(2), placement, list(range(len(graph))))
    assert why_not_captured(timeline, binding, {}) == "random numbers are drawn on several devices (--relaxed_random)"
    assert not why_not_captured(one_device_timeline(graph), binding, step.optimizers())


def test_updates_go_together_by_device_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step("branches", "momentum")
    timeline, binding = plan(step, 2)
    optimizers = optimizers_by_device(timeline, binding, step, range(2))
    assert set(optimizers) == {name for name, _ in step.module.named_parameters()}
    assert len({id(o) for o in optimizers.values()}) == len({timeline.placement[v] for v, b in enumerate(binding.ops) if b.parameters})
    monkeypatch.setattr(updates, "TOGETHER_BYTES", 1)
    assert len({id(o) for o in optimizers_by_device(timeline, binding, step, range(2)).values()}) == len(optimizers)


def test_the_comparison_with_the_larger_difference_is_reported() -> None:
    """On one device the placed step is the program that it is compared with."""
    same, kernels, wrong = (Parity(passed, d, d, "loss", 3, 1e-4) for passed, d in ((True, 0.0), (True, 3e-5), (False, 2e-5)))
    assert worst_of((same, kernels)) is kernels
    assert worst_of((kernels, wrong)) is wrong


def test_kernels_may_round_as_the_unplaced_steps_do_and_no_more() -> None:
    step = make_step("branches", "momentum")
    device, masks = torch.device("cpu"), Masks()
    before = step.snapshot()
    eager = unplaced_results(step, device, None, masks)
    step.restore(before)
    exact = exact_results(step, device, masks)
    assert exact is not None
    assert {value.dtype for name, value in exact.items() if "num_batches" not in name} == {torch.float64}
    assert parity_of_kernels(exact, eager, eager).passed
    assert all(torch.equal(value, before[name]) for name, value in step.snapshot().items())
    for name in ("loss", "gradient of model.last.weight", "new value of model.left.1.running_var"):
        wrong = eager | {name: eager[name] * (1 + 1e-3)}
        parity = parity_of_kernels(exact, eager, wrong)
        assert (parity.passed, parity.worst) == (False, name)
        assert parity_of_kernels(exact, wrong, wrong).passed  # both round alike


@pytest.mark.gpu
@needs_a_device
@pytest.mark.parametrize("num_devices", [1, 2, 4])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw"])
@pytest.mark.parametrize("name", ["branches", "tied"])
def test_graphs_on_cuda_devices(name: str, optimizer: str, num_devices: int) -> None:
    if num_devices > torch.cuda.device_count():
        pytest.skip(f"needs {num_devices} CUDA devices")
    step = make_step(name, optimizer)
    graph, binding = capture_joint(step.module, step.inputs, CaptureOptions(optimizer, step.optimizer.slots, device="cuda"), name)
    timeline = scattered(graph, num_devices, 1)
    with StreamExecutor(cuda_devices(num_devices), 60) as executor:
        expected = run(executor.load(timeline, binding, step))
    with StreamExecutor(cuda_devices(num_devices), 60, CudaRecorder) as executor:
        assert check_parity(executor, timeline, binding, step).passed
        placed = executor.load(timeline, binding, step)
        assert run(placed) == pytest.approx(expected, rel=1e-4)
        assert placed.is_graph, placed.note


@pytest.mark.gpu
@needs_a_device
def test_train_with_graphs() -> None:
    flags = ["--model_name=wide_towers", "--num_gpus=1", "--num_steps=5", "--placement_method=contiguous", "--json"]
    code, out, err = finish(start("train", *flags))
    assert code == 0, err
    report = json.loads(out)
    assert report["parity"]["passed"]
    assert any("one CUDA graph of" in note for note in report["notes"])


def test_a_value_that_rounding_decides_allows_no_other_to_differ() -> None:
    """A truth value that double precision decides otherwise is infinitely far off; four times as far was allowed to all outputs."""
    one, true = torch.ones(3), torch.tensor(True)
    exact = {"output 0": one.double(), "output 1": ~true}
    eager = {"output 0": one, "output 1": true}
    assert parity_of_kernels(exact, eager, dict(eager)).passed
    assert not parity_of_kernels(exact, eager, {**eager, "output 0": 1.5 * one}).passed
    assert not parity_of_kernels(exact, eager, {**eager, "output 1": ~true}).passed


def test_a_graph_is_too_large_for_a_gpu_that_has_less_than_twice_its_memory_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside what is there from the start; parts of one GPU add up."""
    graph = graph_of({"a": 1, "b": 1}, persistent_bytes={"a": 1000, "b": 10}, temporary_bytes={"a": 2**30, "b": 2**29})
    timeline = simulate(graph, Cluster.uniform(2), (0, 1))
    free = {0: 2**31, 1: 2**31}
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (free[gpu.index], 2**40))
    two: Any = [SimpleNamespace(torch_device=torch.device("cuda", index)) for index in (0, 1)]
    assert too_large(timeline, two) == ""
    assert too_large(timeline, two, {torch.device("cuda", 1): float(2**29)}) == ""
    assert "on cuda:1, more than 50%" in too_large(timeline, two, {torch.device("cuda", 1): float(2**29 + 1)})
    assert too_large(timeline, two[:1] * 2) == "it would keep 1.5 of the 2 GiB that are free on cuda:0, more than 50%"
    free[0] -= 1
    assert "on cuda:0" in too_large(timeline, two)
