"""A profile has real samples for every op, adds up, and leaves the step as it was."""

import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baechi_ext.capture.torch_private import memory_profile
from baechi_ext.cost import Profile, attach_costs
from baechi_ext.errors import MismatchError
from baechi_ext.ir.files import read_json
from baechi_ext.simulate.one_device import one_device_timeline
from baechi_ext.stderr import stderr_without
from baechi_runtime.torch import profiler
from baechi_runtime.torch.lowering.devices import cpu_devices
from baechi_runtime.torch.profiler import ProfileOptions, profile_step
from baechi_runtime.torch.threads.executor import ThreadExecutor
from tests.torch_steps import capture, make_step


def profiled(name: str, repeats: int = 4):
    step = make_step(name)
    graph, binding = capture(step)
    with ThreadExecutor(cpu_devices(1), timeout_seconds=60) as executor:
        return step, graph, profile_step(executor, graph, binding, step, ProfileOptions(warmup=1, repeats=repeats))


def test_every_op_has_its_samples_and_bytes() -> None:
    _, graph, profile = profiled("branches")
    assert profile.clock == "thread_cpu"
    assert list(profile.ops) == [op.id for op in graph.ops]
    for op in graph.ops:
        costs = profile.ops[op.id]
        assert len(costs.samples_us) == 4
        assert 0 < costs.min_us <= costs.median_us
        assert (costs.output_bytes, costs.persistent_bytes) == (op.output_bytes, op.persistent_bytes)
    convolution = next(op for op in graph.ops if op.op == "aten.convolution_backward")
    update = graph.ops[graph.index["update.model.last.bias"]]
    assert profile.ops[convolution.id].min_us > profile.ops[update.id].min_us / 10


def test_temporary_bytes_are_what_an_op_allocates_beyond_its_outputs() -> None:
    """softmax over a dimension that is not the last one copies its input; a ReLU needs nothing."""
    _, graph, profile = profiled("branches")
    relu = next(op for op in graph.ops if op.op == "aten.relu")
    assert profile.ops[relu.id].temporary_bytes == 0
    norm = next(op for op in graph.ops if op.op == "aten.native_batch_norm_backward")
    size = next(graph.tensors[t].bytes for t in graph.outputs[graph.index[norm.id]] if graph.tensors[t].bytes)
    assert 0 <= profile.ops[norm.id].temporary_bytes <= 4 * size + 4096


def test_memory_that_was_there_before_is_no_news(capfd: pytest.CaptureFixture[str]) -> None:
    """torch's own profiler warns of every tensor that is freed while it looks, and was made before."""
    older = [torch.ones(1000) for _ in range(3000)]
    with stderr_without(b"nothing"), memory_profile():
        older.clear()
    assert "CPUAllocator" in capfd.readouterr().err
    older = [torch.ones(1000) for _ in range(3000)]
    with stderr_without(b"CPUAllocator.cpp"), memory_profile():
        os.write(2, b"news\n")
        older.clear()
    assert capfd.readouterr().err == "news\n"


def test_profiling_changes_nothing() -> None:
    step = make_step("branches")
    graph, binding = capture(step)
    before, rng = step.snapshot(), torch.get_rng_state()
    with ThreadExecutor(cpu_devices(1), timeout_seconds=60) as executor:
        profile_step(executor, graph, binding, step, ProfileOptions(warmup=0, repeats=1))
    assert torch.equal(rng, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in step.state().items())


def test_beside_other_devices_every_op_is_sampled_again_and_nothing_changes() -> None:
    step = make_step("branches")
    graph, binding = capture(step)
    before, rng = step.snapshot(), torch.get_rng_state()
    with ThreadExecutor(cpu_devices(3), timeout_seconds=60) as executor:
        profile = profile_step(executor, graph, binding, step, ProfileOptions(warmup=1, repeats=3))
        executor.call(2, lambda: None)  # the companions are back
    assert profile.contention is not None
    assert (profile.contention.devices, len(profile.contention.pass_us)) == (3, 3)
    assert all(len(p.samples_us) == len(p.contended_us) == 3 for p in profile.ops.values())
    together, alone = attach_costs(graph, profile, contended=True), attach_costs(graph, profile)
    assert together.total_compute_us() == pytest.approx(statistics.median(profile.contention.pass_us))
    assert together != alone
    assert torch.equal(rng, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in step.state().items())


def test_waits_for_locks_are_in_a_pass_and_waits_for_a_core_are_not() -> None:
    asleep_us, value = profiler._clocked(lambda: time.sleep(0.05) or "value")
    assert value == "value"
    assert asleep_us >= 45_000
    if profiler._waited_for_core_ns() == 0 and not Path("/proc/thread-self/schedstat").exists():
        pytest.skip("the system does not say how long threads wait for a core")
    core = min(os.sched_getaffinity(0))
    pinned = f"import os; os.sched_setaffinity(0, {{{core}}})\nprint(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", pinned], stdout=subprocess.PIPE) as spinner, ThreadPoolExecutor(1) as pool:
        try:
            spinner.stdout.readline()
            pool.submit(os.sched_setaffinity, 0, {core}).result()
            cpu_us, (clocked_us, wall_us) = pool.submit(_spin).result()
        finally:
            spinner.kill()
    assert clocked_us < wall_us
    assert wall_us - clocked_us > (wall_us - cpu_us) / 2


def _spin() -> tuple[float, tuple[float, float]]:
    """Half a second of work: its CPU time, and the pass as it is clocked and by the wall, all in microseconds."""
    begin, cpu = time.perf_counter_ns(), time.thread_time_ns()

    def work() -> None:
        while time.thread_time_ns() - cpu < 500_000_000:
            pass

    clocked_us, _ = profiler._clocked(work)
    return (time.thread_time_ns() - cpu) / 1000, (clocked_us, (time.perf_counter_ns() - begin) / 1000)


def test_long_passes_are_repeated_less() -> None:
    step = make_step("branches")
    graph, binding = capture(step)
    with ThreadExecutor(cpu_devices(1), timeout_seconds=60) as executor:
        profile = profile_step(executor, graph, binding, step, ProfileOptions(warmup=1, repeats=8, enough_seconds=0.0))
    assert {len(p.samples_us) for p in profile.ops.values()} == {profiler.FEWEST_REPEATS}


def test_only_as_many_steps_at_once_as_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step("branches")
    graph, binding = capture(step)
    needed = one_device_timeline(graph).peak_memory_bytes[0]
    found = []
    with ThreadExecutor(cpu_devices(3), timeout_seconds=60) as executor:
        for available in (needed * 1.9, needed * 2.1):
            monkeypatch.setattr(profiler, "available_bytes", lambda available=available: int(available))
            profile = profile_step(executor, graph, binding, step, ProfileOptions(warmup=0, repeats=1))
            found.append(None if profile.contention is None else profile.contention.devices)
    assert found == [None, 2]


def test_a_companion_that_fails_is_heard() -> None:
    step = make_step("branches")
    graph, binding = capture(step)
    with ThreadExecutor(cpu_devices(2), timeout_seconds=60) as executor:
        broken = replace(step, optimizer=replace(step.optimizer, learning_rate="no number"))
        with pytest.raises(TypeError), executor.keep_busy(1, one_device_timeline(graph), binding, broken):
            pass


def test_a_saved_profile_comes_back_and_is_refused_for_another_graph(tmp_path) -> None:
    _, graph, profile = profiled("branches", repeats=2)
    path = tmp_path / "cost.pkl"  # the name does not matter: it is JSON
    profile.save(path)
    assert read_json(path, "profile")["schema_version"] == 1
    assert attach_costs(graph, Profile.load(path, graph)) == attach_costs(graph, profile)
    other, _ = capture(make_step("tied"))
    ours = dict(zip(graph.index, graph.op_digests, strict=True))
    differs = next(op.id for op, digest in zip(other.ops, other.op_digests, strict=True) if ours.get(op.id) != digest)
    with pytest.raises(MismatchError, match=f"of another graph: the first op that differs is '{differs}'"):
        Profile.load(path, other)


def test_passes_end_once_they_are_known_well_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes alone end so, and so do those beside others; with the default options every repeat is made."""
    step = make_step("branches")
    graph, binding = capture(step)

    def repeats(options: ProfileOptions) -> set[int]:
        with ThreadExecutor(cpu_devices(2), timeout_seconds=60) as executor:
            profile = profile_step(executor, graph, binding, step, options)
        return {len(samples) for p in profile.ops.values() for samples in (p.samples_us, p.contended_us)}

    assert repeats(ProfileOptions(warmup=0, repeats=6, enough_error=1e9)) == {profiler.FEWEST_REPEATS}
    assert repeats(ProfileOptions(warmup=0, repeats=6)) == {6}
    errors = {3: 0.02, 4: 0.01, 5: 0.009}
    monkeypatch.setattr(profiler, "_error_of", lambda passes: errors[len(passes)])
    assert repeats(ProfileOptions(warmup=0, repeats=6, enough_error=0.01)) == {5}


def test_the_error_of_a_median_is_that_of_many_medians() -> None:
    """Normal noise of 2 %, for 9 passes at a time."""
    draw = torch.Generator().manual_seed(0)
    passes = 1000 + 20 * torch.randn(4000, 9, generator=draw, dtype=torch.float64)
    medians = passes.median(dim=1).values
    seen = statistics.mean(profiler._error_of(row) for row in passes.tolist())
    assert seen == pytest.approx(medians.std().item() / 1000, rel=0.06)
    assert profiler._error_of([5.0, 5.0, 5.0]) == profiler._error_of([0.0, 0.0, 0.0]) == 0.0


@pytest.mark.parametrize(
    ("steps_us", "device_us", "expected"),
    [
        ((), 9.0, [2.0, 4.0]),  # nothing to scale by
        ((12.0, 9.0, 90.0), 9.0, [4.0, 8.0]),  # the host bounds the step, which takes longer than its ops do one by one
        ((3.0,), 2.0, [1.0, 2.0]),
        ((12.0,), 12.0, [2.0, 4.0]),  # the device does
        ((3.0,), 3.0, [1.0, 2.0]),
    ],
)
def test_what_ops_take_the_host_is_what_steps_do(steps_us: tuple[float, ...], device_us: float, expected: list[float]) -> None:
    assert profiler._as_in_steps([2.0, 4.0], steps_us, device_us) == expected
