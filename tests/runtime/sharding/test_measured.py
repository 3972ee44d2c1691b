"""Costs from a profile: whose time goes to which calls, and that nothing of it is lost silently."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from baechi_ext.shard.machine import Machine
from baechi_ext.shard.search import SearchOptions
from baechi_runtime.cli.main import main
from baechi_runtime.models.registry import ModelOptions
from baechi_runtime.sharding.captured import CapturedGraph
from baechi_runtime.sharding.models import captured_model
from baechi_runtime.sharding.pase import PaseRequest

SIZES = ["--batch_size=4", "--image_size=64"]
OPTIONS = ModelOptions(batch_size=4, image_size=64)
Run = Callable[..., tuple[int, str, str]]


def alexnet(profile: Path | None = None) -> CapturedGraph:
    """A small AlexNet, captured, for slow devices."""
    request = PaseRequest(
        graph="alexnet",
        batch=4,
        width=None,
        cost_model="default",
        splits_images=False,
        machine=Machine(devices=2, tera_flops=0.02),
        options=SearchOptions(),
        model_options=OPTIONS,
        cost_path=None if profile is None else str(profile),
    )
    found = captured_model(request)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real profile of a small AlexNet step."""
    file = tmp_path_factory.mktemp("costs") / "cost.json"
    assert main(["train", "--model_name=alexnet", *SIZES, "--costgen", f"--cost_path={file}"]) == 0
    return file


def test_a_modules_time_goes_to_its_calls(profile: Path) -> None:
    counted = alexnet()
    found = alexnet(profile)
    assert found.measured is not None
    assert counted.graph.edges == found.graph.edges
    assert 0.8 * found.measured.all_us < found.measured.us <= found.measured.all_us
    assert found.measured.calls >= 20
    seconds = {n.name: n.flop() / 0.02e12 for n in found.graph.nodes}
    assert sum(seconds.values()) * 1e6 >= found.measured.us * (1 - 1e-9)
    ops = json.loads(profile.read_text())["ops"]
    least = sum(ops[name]["compute_us"] for name in ops if name.startswith(("convolution", "relu")) and "update" not in name)
    convolutions = sum(us for name, us in seconds.items() if name.startswith(("conv", "relu"))) * 1e6
    assert convolutions > 0.5 * least
    assert seconds["linear"] > seconds["relu_5"]


def test_a_slower_module_counts_for_more(profile: Path, tmp_path: Path) -> None:
    """Ten times the time for one module's ops is ten times its calls' operations, and no others'."""
    value = json.loads(profile.read_text())
    slow = tmp_path / "slow.json"
    names = [name for name in value["ops"] if name.startswith("convolution")]
    for name in names:
        value["ops"][name]["samples_us"] = [10 * us for us in value["ops"][name]["samples_us"]]
        value["ops"][name]["compute_us"] *= 10
    slow.write_text(json.dumps(value))
    before, after = (
        {n.name: n.flop() for n in alexnet(p).graph.nodes} for p in (profile, slow)
    )
    assert after["conv2d_1"] > 5 * before["conv2d_1"]
    assert after["linear_1"] < 2 * before["linear_1"]


def test_a_profile_of_another_step_is_refused(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pase", "--model_name=alexnet", "--batch_size=8", "--image_size=64", f"--cost_path={profile}"]) == 1
    assert "profile" in capsys.readouterr().err
    assert main(["pase", "--model_name=alexnet", *SIZES, "-p", "2", f"--cost_path={profile}"]) == 0
    assert "measured, by module" in capsys.readouterr().out
