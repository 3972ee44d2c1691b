"""Measuring: statistics with known answers, honest doubts, and a real interleaved run."""

import gc
import json
import os
import time
from dataclasses import replace

import pytest
import torch

from baechi_ext.ir import Cluster
from baechi_ext.simulate import simulate
from baechi_runtime.host.processor import available_cores
from baechi_runtime.measure.link_probe import PROBE_BYTES
from baechi_runtime.measure.samples import LoadOfOthers, Measurement, Ratio, Samples, busy_seconds
from baechi_runtime.measure.timing import StepTimes, measure_in_turn
from baechi_runtime.report.report import ProbedLink
from baechi_runtime.torch.lowering.devices import CpuDevice, cpu_devices
from baechi_runtime.torch.measure import cores_of, measure, measured_peak_bytes
from baechi_runtime.torch.threads.executor import ThreadExecutor
from tests.runtime.forked import python
from tests.torch_steps import capture, make_step, scattered


def test_a_ratio_is_of_pairs() -> None:
    ratio = Ratio.of(Samples((2.0, 4.0, 9.0)), Samples((1.0, 2.0, 3.0)))
    assert (ratio.median, ratio.low, ratio.high) == (2.0, 2.0, 3.0)


@pytest.mark.parametrize(("n", "rank"), [(1, 0), (5, 0), (6, 0), (8, 0), (9, 1), (12, 2), (20, 5), (100, 39), (20_000, 9_860)])
def test_the_interval_is_the_sign_tests(n: int, rank: int) -> None:
    """Ranks as tables of the 95% interval of the median give them (n 6: 1st to 6th; 9: 2nd to 8th; 20: 6th to 15th)."""
    ratio = Ratio.of(Samples(tuple(float(i + 1) for i in range(n))), Samples((1.0,) * n))
    assert (ratio.low, ratio.high) == (1.0 + rank, float(n - rank))


@pytest.mark.parametrize(("n", "rank"), [(7, 0), (20, 4)])
def test_a_ratio_of_steps_that_were_not_taken_in_turn(n: int, rank: int) -> None:
    """From the two medians' intervals, each of 97.5% (n 20: 5th to 16th)."""
    slow, fast = Samples(tuple(10.0 + i for i in range(n))), Samples(tuple(2.0 + i for i in reversed(range(n))))
    ratio = Ratio.unpaired(slow, fast)
    assert ratio.median == slow.median / fast.median
    assert (ratio.low, ratio.high) == ((10 + rank) / (n + 1 - rank), (n + 9 - rank) / (2 + rank))


def test_a_machine_that_slows_down_for_a_while_slows_both_kinds_of_a_block() -> None:
    """Twelve steps of each kind in blocks of two, half as fast from the seventh on: each block's ratio is 1.5; steps that were not taken in
    blocks, and fewer than six blocks, are compared by medians whose intervals are wide."""
    speeds = [1.0] * 6 + [2.0] * 6
    plain, placed = (Samples(tuple(us * speed for speed in speeds)) for us in (3.0, 2.0))
    ratio = Ratio.of_script(plain, placed, 2)
    assert (ratio.low, ratio.median, ratio.high) == (1.5, 1.5, 1.5)
    assert Ratio.of_script(plain, placed, 0) == Ratio.unpaired(plain, placed)
    assert Ratio.unpaired(plain, placed).spread == pytest.approx((3.0 - 0.75) / 1.5)
    few = [Samples(samples.us[1:]) for samples in (plain, placed)]
    assert Ratio.of_script(*few, 2) == Ratio.unpaired(*few)


def quiet(placed: tuple[float, ...], **changes: object) -> Measurement:
    fields = {
        "samples": {"eager": Samples((2.0,) * len(placed)), "placed": Samples(placed)},
        "busy_us": {"placed": (1.0, 1.0)},
        "load_of_others": 0.01,
        "oversubscribed": False,
    }
    return Measurement(**{**fields, **changes})


def test_a_quiet_run_has_no_doubts() -> None:
    assert quiet((1.0,) * 8).doubts() == []


@pytest.mark.parametrize(
    ("measurement", "reason"),
    [
        (quiet((1.0,) * 8, load_of_others=0.4), "other processes took 40% of the cores"),
        (quiet((1.0, 2.0) * 4), "the ratio's interval is"),
        (quiet((1.0,) * 3), "fewer than 6 steps"),
        (quiet((1.0,) * 8, oversubscribed=True), "more CPU devices than cores"),
    ],
)
def test_a_noisy_run_says_so(measurement: Measurement, reason: str) -> None:
    assert len(measurement.doubts()) == 1
    assert reason in measurement.doubts()[0]


def test_a_real_measurement() -> None:
    step = make_step("branches")
    graph, binding = capture(step)
    before = step.snapshot()
    rounds = []
    with ThreadExecutor(cpu_devices(2), timeout_seconds=60) as executor:
        variants = {
            "single": executor.load(scattered(graph, 1, 0), binding, step),
            "placed": executor.load(scattered(graph, 2, 0), binding, step),
        }
        result = measure(executor, step, variants, num_steps=4, warmup=1, on_step=rounds.append)
    assert rounds == [0, 1, 2, 3, 4]
    assert {name: len(s.us) for name, s in result.samples.items()} == {"eager": 4, "single": 4, "placed": 4}
    assert all(us > 0 for s in result.samples.values() for us in s.us)
    assert {name: len(busy) for name, busy in result.busy_us.items()} == {"single": 1, "placed": 2}
    assert all(0 < busy <= 4 * max(result.samples["placed"].us) for busy in result.busy_us["placed"])
    assert result.load_of_others is None or result.load_of_others >= 0
    assert all(torch.equal(value, before[name]) for name, value in step.state().items())


@pytest.mark.parametrize("collects", [True, False])
def test_the_collector_is_left_as_it_was(collects: bool) -> None:
    """Off while steps are timed, and afterwards where the user had it off."""
    during = []

    def step() -> StepTimes:
        during.append(gc.isenabled())
        return StepTimes(1.0, ())

    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        measure_in_turn({"placed": step}, lambda: LoadOfOthers(time.process_time, ()), num_steps=2, oversubscribed=False)
        after = gc.isenabled()
    finally:
        (gc.enable if before else gc.disable)()
    assert not any(during)
    assert after == collects


STAT = """cpu  500 0 0 9000 0 0 0 0 0 0
cpu0 100 0 0 4000 50 0 0 0 0 0
cpu1 200 5 10 3000 0 1 2 7 0 0
cpu10 200 0 0 2000 0 0 0 0 0 0
intr 12345
"""


@pytest.mark.parametrize(("cores", "ticks"), [((0,), 100), ((1,), 225), ((0, 10), 300), ((2,), 0)])
def test_only_the_runs_cores_count(cores: tuple[int, ...], ticks: int) -> None:
    """Idle and waiting are not busy; stolen is. A core that the system does not list is idle."""
    assert busy_seconds(STAT, cores) == pytest.approx(ticks / os.sysconf("SC_CLK_TCK"))


def test_the_load_is_of_the_cores_that_the_process_may_use() -> None:
    """On one core of several the run itself is all there is, however busy the others are."""
    code = (
        "import os, json; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "from baechi_runtime.torch.lowering.devices import cpu_devices; devices = cpu_devices(2); devices[1].enter();"
        "print(json.dumps([list(d.cores) for d in devices]))"
    )
    done = python("-c", code)
    assert json.loads(done.stdout) == [[min(available_cores())]] * 2


class Listed(CpuDevice):
    """A device of a process that may use eight cores."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.cores, self.core = tuple(range(8)), 2 * index + 1


def test_the_load_of_others_is_that_on_the_cores_of_the_devices() -> None:
    """A busy core that no device is on takes nothing from a step."""
    devices = [Listed(1), Listed(0)]
    assert cores_of(devices) == (1, 3)
    del devices[0].core  # as a GPU, whose thread is on no core of its own
    assert cores_of(devices) == tuple(range(8))


def test_oversubscription_is_noticed() -> None:
    step = make_step("tied")
    graph, binding = capture(step)
    devices = [CpuDevice(0), CpuDevice(0)]
    with ThreadExecutor(devices, timeout_seconds=60) as executor:
        placed = executor.load(scattered(graph, 2, 0), binding, step)
        result = measure(executor, step, {"single": placed, "placed": placed}, num_steps=1, warmup=0)
    assert result.oversubscribed


def test_counted_memory_agrees_with_the_simulator() -> None:
    """One device, no profiled temporaries: both count the same tensors over the same order of ops."""
    for name in ("branches", "tied"):
        step = make_step(name, "momentum")
        graph, binding = capture(step)
        timeline = scattered(graph, 1, 4)
        with ThreadExecutor(cpu_devices(1), timeout_seconds=60) as executor:
            (measured,) = measured_peak_bytes(executor, timeline, binding, step)
        resident = sum(op.persistent_bytes for op in graph.ops)
        assert measured > resident > 0
        costed = graph.replace_ops([replace(op, compute_us=1.0) for op in graph.ops])
        rank = {v: i for i, v in enumerate(timeline.started)}
        order = [rank[v] for v in range(len(graph))]
        (predicted,) = simulate(costed, Cluster.uniform(1), [0] * len(graph), order).peak_memory_bytes
        assert measured == pytest.approx(predicted, rel=0.05)


def test_a_probed_link() -> None:
    with ThreadExecutor(cpu_devices(2), timeout_seconds=60) as executor:
        probe = executor.probe_link()
    assert tuple(probe.samples_us) == PROBE_BYTES
    assert all(len(s) == 30 and min(s) > 0 for s in probe.samples_us.values())
    link = probe.to_link()
    assert link.latency_us + link.us_per_byte > 0
    assert ProbedLink.of(probe).latency_us == link.latency_us
