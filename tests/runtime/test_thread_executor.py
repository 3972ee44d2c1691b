"""The thread executor computes what the unplaced step computes, and fails cleanly."""

import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from baechi_ext.errors import ExecutionError
from baechi_ext.ir import Cluster
from baechi_ext.simulate import simulate
from baechi_runtime.measure.comparator import compare
from baechi_runtime.models.training_step import OPTIMIZERS, EagerStep
from baechi_runtime.torch.lowering.devices import cpu_devices
from baechi_runtime.torch.parity import check_parity
from baechi_runtime.torch.threads.executor import Mailboxes, ThreadExecutor
from tests.torch_steps import capture, make_step, scattered


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["branches", "tied"])
@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_parity_of_random_placements(name: str, num_devices: int, optimizer: str) -> None:
    step = make_step(name, optimizer)
    graph, binding = capture(step)
    with ThreadExecutor(cpu_devices(num_devices), timeout_seconds=60) as executor:
        for seed in range(3):
            before = step.snapshot()
            parity = check_parity(executor, scattered(graph, num_devices, seed), binding, step)
            assert (parity.passed, parity.max_abs_diff) == (True, 0.0), parity
            assert parity.compared == 1 + len(list(step.module.parameters())) + len(step.state())
            assert all(torch.equal(value, before[n]) for n, value in step.state().items())


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", ["branches", "tied"])
def test_twenty_steps_have_the_same_losses(name: str, optimizer: str) -> None:
    curves = []
    for placed_run in (False, True):
        step = make_step(name, optimizer)
        graph, binding = capture(step)
        with ThreadExecutor(cpu_devices(2), timeout_seconds=60) as executor:
            placed = executor.load(scattered(graph, 2, 5), binding, step)
            eager = EagerStep(step, torch.device("cpu"))
            torch.manual_seed(11)
            run = (lambda p=placed: p.run()[0]) if placed_run else (lambda e=executor, s=eager: e.call(0, s.run))
            curves.append([run().item() for _ in range(20)])
    assert curves[0] == curves[1]
    assert curves[0][-1] < curves[0][0]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_what_an_optimizer_keeps_is_what_the_plan_counts(optimizer: str) -> None:
    step = make_step("tied", optimizer)
    eager = EagerStep(step, torch.device("cpu"))
    eager.run()
    for parameter, state in eager.optimizer.state.items():
        kept = [value for value in state.values() if isinstance(value, torch.Tensor) and value.dim() > 0]
        assert [value.shape for value in kept] == [parameter.shape] * step.optimizer.slots


def test_gradients_are_not_left_on_parameters_and_values_are_freed() -> None:
    step = make_step("branches")
    graph, binding = capture(step)
    with ThreadExecutor(cpu_devices(2), timeout_seconds=60) as executor:
        placed = executor.load(scattered(graph, 2, 1), binding, step)
        loss, times = placed.run()
        assert loss.shape == ()
        assert times.wall_us > 0
        assert len(times.busy_us) == 2
    assert all(p.grad is None for p in step.module.parameters())


def test_relaxed_random_still_computes() -> None:
    step = make_step("branches")
    graph, binding = capture(step, relaxed_random=True)
    with ThreadExecutor(cpu_devices(2), timeout_seconds=60) as executor:
        loss, _ = executor.load(scattered(graph, 2, 2), binding, step).run()
    assert torch.isfinite(loss)


def test_an_op_that_fails_stops_all_devices_and_names_one() -> None:
    step = make_step("branches")
    graph, binding = capture(step)
    with ThreadExecutor(cpu_devices(2), timeout_seconds=60) as executor:
        placed = executor.load(scattered(graph, 2, 0), binding, step)
        step.inputs[1].fill_(99)  # no such class: the loss raises
        begin = time.monotonic()
        with pytest.raises(ExecutionError, match=r"device cpu:[01] failed in op 'nll_loss_forward': IndexError: Target 99 is out"):
            placed.run()
        assert time.monotonic() - begin < 30
        assert executor.call(0, lambda: 5) == 5


def test_a_device_that_does_not_answer_is_named_after_the_time_out() -> None:
    release = threading.Event()
    with ThreadExecutor(cpu_devices(2), timeout_seconds=0.3) as executor:
        with pytest.raises(ExecutionError, match=r"device cpu:1 did not answer within 0\.3 s; raise --timeout"):
            executor.run_all([lambda: None, release.wait], on_failure=lambda: None)
        release.set()


def test_what_two_threads_run_on_all_devices_does_not_wait_for_each_other() -> None:
    """Both run tasks that wait for each other; the second thread's come while the first one has given a task to one device alone."""
    given, results = threading.Event(), {}

    def together(meet: threading.Barrier) -> list[Callable[[], int]]:
        return [lambda: meet.wait(20), lambda: meet.wait(20)]

    def second() -> None:
        tasks = together(threading.Barrier(2))

        def last() -> Iterator[Callable[[], int]]:
            yield tasks[0]
            yield tasks[1]
            given.set()

        results["second"] = executor.run_all(last(), on_failure=lambda: None)

    def in_between() -> Iterator[Callable[[], int]]:
        first, then = together(threading.Barrier(2))
        yield first
        other.start()
        given.wait(1.0)  # with a turn for each it is not given before this one has ended
        yield then

    other = threading.Thread(target=second)
    with ThreadExecutor(cpu_devices(2), timeout_seconds=60) as executor:
        results["first"] = executor.run_all(in_between(), on_failure=lambda: None)
        other.join()
    assert {name: sorted(found) for name, found in results.items()} == {"first": [0, 1], "second": [0, 1]}


def test_what_runs_on_all_devices_waits_while_another_thread_keeps_some_busy() -> None:
    step = make_step("tied")
    graph, binding = capture(step)
    timeline = simulate(graph, Cluster.uniform(1), [0] * len(graph))
    began, meet, found = threading.Event(), threading.Barrier(2), []

    def run() -> None:
        began.set()
        found.append(sorted(executor.run_all([lambda: meet.wait(20), lambda: meet.wait(20)], on_failure=lambda: None)))

    other = threading.Thread(target=run)
    with ThreadExecutor(cpu_devices(2), timeout_seconds=60) as executor:
        with executor.keep_busy(1, timeline, binding, step):
            other.start()
            began.wait()
            other.join(1.0)
            assert executor.call(0, lambda: "profiled") == "profiled"  # it was behind the other's task, which waits for device 1
            executor.run_all([lambda: 1], on_failure=lambda: None)  # of the same thread
        other.join()
    assert found == [[0, 1]]


def test_an_interrupted_run_stops_the_devices_and_leaves_no_answer_behind() -> None:
    stopped, ended = threading.Event(), threading.Event()

    def interrupts() -> str:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        stopped.wait(60)
        ended.set()
        return "of the interrupted run"

    with ThreadExecutor(cpu_devices(2)) as executor:
        with pytest.raises(KeyboardInterrupt):
            executor.run_all([lambda: "at once", interrupts], on_failure=stopped.set)
        assert ended.is_set()
        assert executor.run_all([lambda: 1, lambda: 2], on_failure=stopped.set) == [1, 2]


def test_closing_ends_the_threads() -> None:
    before = set(threading.enumerate())
    with ThreadExecutor(cpu_devices(3)) as executor:
        started = set(threading.enumerate()) - before
        assert len(started) == 3
        executor.call(0, lambda: None)
    assert not any(t.is_alive() for t in started)


def test_a_plan_for_more_devices_is_refused() -> None:
    step = make_step("tied")
    graph, binding = capture(step)
    timeline = simulate(graph, Cluster.uniform(3), [0] * len(graph))
    with ThreadExecutor(cpu_devices(2)) as executor, pytest.raises(ExecutionError, match="plan is for 3 devices, the executor has 2"):
        executor.load(timeline, binding, step)


def test_parity_sees_a_difference() -> None:
    same = {"loss": torch.tensor(1.0), "gradient of w": torch.tensor([1.0, -2.0])}
    assert compare(same, same, 1e-6).passed
    off = {**same, "gradient of w": torch.tensor([1.0, -2.0 - 1e-4])}
    parity = compare(same, off, 1e-6)
    assert not parity.passed
    assert parity.worst == "gradient of w"
    assert parity.max_rel_diff == pytest.approx(5e-5, rel=0.01)
    assert not compare(same, {"loss": torch.tensor(1.0)}, 1e-6).passed
    assert not compare(same, {**same, "loss": torch.tensor(float("nan"))}, 1e-6).passed


def test_a_device_that_still_sends_when_another_failed_is_not_blamed() -> None:
    boxes = Mailboxes(timeout_seconds=5)
    give, take = boxes.giver(0, 1), boxes.taker(1, 1)
    boxes.abort()
    with pytest.raises(ExecutionError, match="another device failed"):
        give("late")
    with pytest.raises(ExecutionError, match="another device failed"):
        take()
