"""Trainings on TensorFlow's servers that are interrupted, or come to harm, and go on: the same losses bit for bit, whatever the plan."""

import contextlib
import io
import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from safetensors.numpy import load_file, save_file

from baechi_ext.errors import CheckpointError, ExecutionError
from baechi_runtime.cli.main import main
from baechi_runtime.drivers.train_request import RunOptions
from baechi_runtime.drivers.training import Progressed, train_on
from baechi_runtime.files.checkpoint_folder import written_shard
from baechi_runtime.tensorflow.backend import TrainedSession
from baechi_runtime.tensorflow.servers.devices import Devices, Logical, Servers
from tests.processes import ended
from tests.runtime.forked import Forked, start
from tests.runtime.tensorflow.steps import Step, branches
from tests.runtime.trainings import undisturbed
from tests.runtime.workers import command_line, finish, only_error
from tests.tensorflow_steps import image_step

TRAINING = {"model": "small"}
SOON = 60.0
"""Seconds; generous, since the machine may be busy."""


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with Servers(2) as servers:
        yield servers


@pytest.fixture(scope="module")
def step() -> Step:
    """A step with batch normalisation, dropout and Adam: all their state is in variables."""
    image = image_step()
    captured = image.capture()
    return Step(captured, image.function, image.inputs, {v.shared_name: v.variable.numpy() for v in captured.variables})


def scattered(step: Step, seed: int) -> list[int]:
    """A placement of colocation groups, and of ops without one, on two devices by lot."""
    draw, where = np.random.default_rng(seed), {}
    return [where.setdefault(op.colocation or op.id, int(draw.integers(2))) for op in step.captured.graph.ops]


def train(
    step: Step, devices: Devices, folder: Path | None, steps: int, *, plan: int | None = None, resume: bool = False
) -> Progressed:
    """Trains with a checkpoint after every second step; placed by lot, or with no plan on the first device."""
    placement = [0] * len(step.captured.graph) if plan is None else scattered(step, plan)
    order = list(step.captured.graph.index) if isinstance(devices, Logical) else None
    with step.session(devices, placement, order) as session:
        options = RunOptions(steps, None if folder is None else str(folder), 2, resume)
        return train_on(TrainedSession(session), options, TRAINING, lambda _: None)


def test_it_goes_on_with_the_same_losses(step: Step, servers: Servers, tmp_path: Path) -> None:
    """On other devices, of servers and of this process."""
    whole = train(step, servers, None, 9, plan=0)
    assert len(set(whole.losses)) == 9
    first = train(step, servers, tmp_path, 4, plan=0)
    assert (first.resumed_from, first.checkpoint_step, first.losses) == (None, 4, whole.losses[:4])
    second = train(step, servers, tmp_path, 7, plan=1, resume=True)
    assert (second.resumed_from, second.checkpoint_step, len(second.step_us)) == (4, 7, 3)
    with Logical(2) as logical:
        third = train(step, logical, tmp_path, 8, plan=2, resume=True)
    last = train(step, servers, tmp_path, 9, resume=True)
    assert last.losses == third.losses + last.losses[8:] == second.losses + last.losses[7:] == whole.losses
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000008", "step_00000009"]


def test_the_losses_are_those_of_the_unplaced_step(servers: Servers) -> None:
    step = branches()
    found = train(step, servers, None, 3, plan=0).losses
    function = tf.function(step.function)
    np.testing.assert_allclose(found, [float(function(*step.inputs)) for _ in range(3)], rtol=1e-5)


def test_every_variable_is_kept_with_its_device(step: Step, servers: Servers, tmp_path: Path) -> None:
    train(step, servers, tmp_path, 2, plan=0)
    shards = [load_file(tmp_path / "step_00000002" / f"device_{device}.safetensors") for device in (0, 1)]
    assert sorted(name for shard in shards for name in shard) == sorted(step.first)
    assert all(shards)
    kept = shards[0] | shards[1]
    assert {n: (x.shape, x.dtype) for n, x in kept.items()} == {n: (x.shape, x.dtype) for n, x in step.first.items()}
    assert any(not np.array_equal(kept[n], x) for n, x in step.first.items())


def test_checkpoints_that_do_not_fit_are_refused(step: Step, servers: Servers, tmp_path: Path) -> None:
    train(step, servers, tmp_path, 2)
    with pytest.raises(CheckpointError, match="has no tensor '.*first_0.*'; it is of another model: choose another --checkpoint"):
        train(branches(), servers, tmp_path, 4, resume=True)
    path = tmp_path / "step_00000002" / "device_0.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"device_0.safetensors is damaged: .*; remove .*step_00000002 to go on"):
        train(step, servers, tmp_path, 4, resume=True)


def test_a_tensor_of_another_shape_is_refused(step: Step, servers: Servers, tmp_path: Path) -> None:
    name = min(n for n, x in step.first.items() if x.ndim > 1)
    with step.session(servers, [0] * len(step.captured.graph)) as session:
        trained = TrainedSession(session)
        values = load_file(tmp_path / trained.save(tmp_path)[0].file)
        values[name] = np.zeros((1, 2), np.float32)
        shard = written_shard(tmp_path, 0, lambda path: save_file(values, path))
        with pytest.raises(CheckpointError, match=r"is float32 of shape \(1, 2\), this model's is float32 of shape .*; give the flags"):
            trained.restore(tmp_path, [shard])


def test_a_server_that_dies_says_where_to_go_on(tmp_path: Path) -> None:
    step = branches()
    with Servers(2, timeout_seconds=SOON) as servers, step.session(servers, scattered(step, 0)) as session:
        trained = TrainedSession(session)

        def news(text: str) -> None:
            if text.startswith("step 5 "):
                servers.servers[1].process.kill()

        message = "the server of device 1 .* was killed by SIGKILL.*; this was step 6: --resume goes on from the checkpoint of step 4"
        with pytest.raises(ExecutionError, match=message):
            train_on(trained, RunOptions(9, str(tmp_path), 2), TRAINING, news)
    with Servers(2) as others:
        again = train(step, others, tmp_path, 9, plan=0, resume=True)
        assert again.resumed_from == 4
        assert again.losses == train(step, others, None, 9, plan=0).losses


MODEL = [
    *("train", "--framework=tensorflow", "--model_name=wide_towers", "--batch_size=2", "--image_size=2", "--d_model=8", "--num_layers=1"),
    *("--optimizer=adam", "--placement_method=round_robin", "--comm_cost_coeffs=0.001,50", f"--timeout={SOON:g}"),
]


def losses_of(*flags: str) -> list[float]:
    """The losses of a training by command line in this process that is to end well."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main([*MODEL, *flags, "--json"]) == 0
    return json.loads(out.getvalue())["losses"]


@pytest.fixture(scope="module")
def whole(costs: str) -> Callable[[int], list[float]]:
    """The losses of this many steps of a training that nothing happens to."""
    return undisturbed(partial(losses_of, costs))


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The flag that spares runs the profile."""
    path = tmp_path_factory.mktemp("costs") / "cost.json"
    with contextlib.redirect_stdout(io.StringIO()):
        assert main([*MODEL, "--costgen", f"--cost_path={path}"]) == 0
    return f"--cost_path={path}"


def servers_of(parent: int) -> list[int]:
    """Process ids of its servers."""
    found = [p for p in Path("/proc").glob("[0-9]*") if "baechi_runtime.tensorflow.servers.server_process" in command_line(p)]
    return sorted(int(p.name) for p in found if parent_of(p) == parent)


def parent_of(process: Path) -> int | None:
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def wait_for_steps(folder: Path, process: Forked) -> None:
    while not any(path.name >= "step_00000002" for path in folder.glob("step_*")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


@pytest.mark.parametrize("victim", ["server", "client", "interrupt"])
def test_a_training_by_command_line_is_ended_and_goes_on(
    costs: str, whole: Callable[[int], list[float]], tmp_path: Path, victim: str
) -> None:
    run = tmp_path / "run"
    process = start(*MODEL, costs, "--train_steps=1000000", f"--checkpoint={run}", "--checkpoint_every=1")
    try:
        wait_for_steps(run, process)
        pids = servers_of(process.pid)
        assert len(pids) == 2
        if victim == "server":
            subprocess.run(["kill", "-KILL", str(pids[1])], check=True)
        else:
            process.send_signal(signal.SIGKILL if victim == "client" else signal.SIGINT)
        code, out, err = finish(process, timeout=2 * SOON)
    finally:
        process.kill()
    assert (code, out) == ({"server": 1, "client": -signal.SIGKILL, "interrupt": 130}[victim], "")
    if victim != "client":
        said = only_error(err)
        assert "--resume goes on from the checkpoint of step " in said
        assert victim == "interrupt" or re.search(r"was killed by SIGKILL \(its part of the plan takes \d+ bytes\); check", said)
    assert ended(pids, SOON)
    steps = max(int(path.name.removeprefix("step_")) for path in run.glob("step_*")) + 3  # one may be unfinished
    assert losses_of(costs, f"--train_steps={steps}", f"--checkpoint={run}", "--resume") == whole(steps)
