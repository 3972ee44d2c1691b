"""The speeds of devices, as they show side by side."""

import json
from dataclasses import replace

import pytest
import torch

from baechi_ext.ir import Cluster, Link
from baechi_runtime.drivers.pipeline import PlanRequest
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.host.processor import available_cores
from baechi_runtime.measure.device_speeds import Pace, note_on, speeds_of
from baechi_runtime.torch.backend import TorchBackend
from baechi_runtime.torch.cluster import with_measured_speeds
from baechi_runtime.torch.lowering.devices import CpuDevice
from baechi_runtime.torch.lowering.link_player import play_pace
from baechi_runtime.torch.processes.launch import run_workers
from baechi_runtime.torch.threads.executor import ThreadExecutor
from tests.torch_steps import capture, make_step, scattered

WINDOWS = 20


def steady(wall_us: float, clock_us: float) -> Pace:
    return Pace((wall_us,) * WINDOWS, (clock_us,) * WINDOWS)


@pytest.mark.parametrize(
    ("paces", "speeds"),
    [
        ([steady(100, 100), steady(110, 110)], (1, 1)),
        ([steady(100, 100), steady(200, 100)], (1, 0.5)),  # the core of the second is shared
        ([steady(200, 100), steady(100, 100)], (0.5, 1)),
        ([steady(100, 100), steady(200, 200)], (1, 0.5)),  # it is slower
        ([steady(200, 200), steady(100, 100)], (1, 2)),  # costs are of the slower one
        ([steady(400, 200), steady(100, 100)], (0.5, 2)),  # slower and shared
        ([steady(300, 100), steady(300, 100)], (1, 1)),  # both are shared: the costs leave it out, as ever
        ([steady(100, 100), steady(116, 100), steady(300, 100)], (1, 0.86, 0.33)),
    ],
)
def test_speeds(paces: list[Pace], speeds: tuple[float, ...]) -> None:
    """An op of device 0 that takes one unit takes as much more on a device as that takes for the unit."""
    assert speeds_of(paces) == speeds


@pytest.mark.parametrize(("disturbed", "speed"), [(2, 0.5), (3, 1)])
def test_a_difference_counts_where_nine_windows_of_ten_show_it(disturbed: int, speed: float) -> None:
    moved = Pace((100.0,) * disturbed + (200.0,) * (WINDOWS - disturbed), (100.0,) * WINDOWS)
    assert speeds_of([steady(100, 100), moved]) == (1, speed)


class Slow(CpuDevice):
    """Each unit of work, and many times that again."""

    def synchronize(self) -> None:
        matrix = torch.ones(192, 192)
        for _ in range(39):
            torch.mm(matrix, matrix)


@pytest.mark.skipif(len(available_cores()) < 2, reason="needs two cores")
def test_a_device_that_is_slower_gets_a_speed_and_a_note() -> None:
    with ThreadExecutor([CpuDevice(0), Slow(1)]) as executor:
        step = make_step("branches")
        graph, binding = capture(step)
        loaded = executor.load(scattered(graph, 2, 0), binding, step)
        request = TrainRequest("gpt2", PlanRequest(), link=Link())
        backend = TorchBackend(request, executor)
        fast, slow = (device.speed for device in backend.cluster()[0].devices)
        assert fast == 1
        assert 0 < slow < 0.5
        assert backend.notes(loaded) == [note_on(["cpu:0", "cpu:1"], (fast, slow))]
        equal = TorchBackend(replace(request, device_speeds=(1.0,)), executor)
        assert [device.speed for device in equal.cluster()[0].devices] == [1, 1]
        assert equal.notes(loaded) == []


def test_devices_that_share_a_core_are_not_compared() -> None:
    with ThreadExecutor([CpuDevice(0), Slow(len(available_cores()))]) as executor:
        assert with_measured_speeds(Cluster.uniform(2), executor) == (Cluster.uniform(2), ())


def test_a_window_that_is_over_before_it_has_begun_has_a_pace() -> None:
    """As of a thread that was held off."""
    pace = play_pace(CpuDevice(0), 2, 0.0)
    assert len(pace.wall_us) == 2
    assert min(pace.wall_us) > 0


def test_worker_processes_show_their_paces(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_workers([], 2, "tests.runtime.paces_on_processes") == 0
    paces = json.loads(capfd.readouterr().out)
    assert [len(pace["wall_us"]) for pace in paces] == [3, 3]
    for pace in paces:
        assert all(clock_us > 0 for clock_us in pace["clock_us"])
