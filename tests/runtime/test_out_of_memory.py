"""A device's memory limit is kept while a placed step runs on worker processes: whoever takes more ends the run with one clear line."""

import json
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from baechi_ext.capture.torch_joint import CaptureOptions, capture_joint
from baechi_ext.cost import Profile, attach_costs
from baechi_ext.errors import InfeasibleError
from baechi_ext.ir import Cluster, Link, OpGraph
from baechi_ext.ir.hints import ExpertFile
from baechi_runtime.drivers import pipeline
from baechi_runtime.models.registry import ModelOptions, make_step
from baechi_runtime.models.training_step import optimizer_spec
from baechi_runtime.torch.lowering.devices import cpu_devices
from baechi_runtime.torch.lowering.memory_limit import SLACK_BYTES
from baechi_runtime.torch.profiler import ProfileOptions, profile_step
from baechi_runtime.torch.threads.executor import ThreadExecutor
from tests.runtime.forked import start
from tests.runtime.forked_workers import ForkedWorkers
from tests.runtime.workers import finish, only_error, workers_of

WIDE = ModelOptions(batch_size=1, vocab_size=300_000, max_seq_length=2, rnn_units=64, num_layers=2, rnn_chunk=2)
"""Three weights of 73 MiB, and little to compute. Adam needs another 146 MiB for a moment while it updates one."""
LINK = Link(us_per_byte=0.001, latency_us=100.0)
"""Plans are timed with it, here and in the run: what is held at a time depends on when what is moved."""
FLAGS = [
    *("train", "--model_name=gnmt_v2", "--optimizer=adam", "--workers=process", "--placement_method=expert"),
    *(f"--comm_cost_coeffs={LINK.us_per_byte},{LINK.latency_us}", "--device_speeds=1"),
    *(f"--{name}={getattr(WIDE, name)}" for name in ("batch_size", "vocab_size", "max_seq_length", "rnn_units", "num_layers", "rnn_chunk")),
]


@pytest.fixture(scope="module")
def profiled() -> tuple[OpGraph, Profile]:
    """The graph without costs, and its real profile."""
    step = make_step("gnmt_v2", WIDE, optimizer_spec("adam", 0.01))
    graph, binding = capture_joint(step.module, step.inputs, CaptureOptions("adam", 2), "gnmt_v2")
    with ThreadExecutor(cpu_devices(1)) as executor:
        return graph, profile_step(executor, graph, binding, step, ProfileOptions(warmup=0, repeats=1))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_that_takes_more_than_its_profile_said(profiled: tuple[OpGraph, Profile], tmp_path: Path, rank: int) -> None:
    """The profile is made to say that no op needs temporary memory; a plan that fits exactly by it does not fit the real step."""
    graph, profile = profiled
    rules = tmp_path / "expert.json"
    rules.write_text(json.dumps({"encoder.embedding.weight": 1 - rank, "*": rank}))
    modest = replace(profile, ops={name: replace(op, temporary_bytes=0) for name, op in profile.ops.items()})
    modest.save(tmp_path / "cost.json")
    request = pipeline.PlanRequest(method="expert", expert_file=ExpertFile.load(rules))
    limit = int(max(pipeline.plan(attach_costs(graph, modest), Cluster.uniform(2, link=LINK), request).plan.peak_memory_bytes)) + 1
    exact = Cluster.uniform(2, memory_bytes=limit, link=LINK)
    needed = max(op.temporary_bytes for op in profile.ops.values())
    assert needed > 2 * SLACK_BYTES
    with pytest.raises(InfeasibleError):
        pipeline.plan(attach_costs(graph, profile), exact, request)

    flags = [f"--expert_file={rules}", f"--cost_path={tmp_path / 'cost.json'}", f"--device_memory={limit}"]
    process, started = start(*FLAGS, *flags), {}
    while len(started) < 2:
        assert process.poll() is None, process.communicate()
        started |= workers_of(process.pid)
        time.sleep(0.05)
    code, out, err = finish(process, timeout=300)
    assert (code, out) == (1, "")
    said = only_error(err)
    assert f"device cpu:{rank} ran out of memory in op 'update." in said
    assert f"(its limit is {limit} bytes, and the step takes more than its profile says)" in said
    assert "raise --device_memory, profile again without --cost_path, use more devices, or a smaller batch" in said
    held, largest = re.search(r"it held (\d+) bytes then, most of them in (.*?); raise", said).groups()
    named = re.findall(r"([^,]+?) \((\d+) bytes\)(?:, )?", largest)
    weights = [f"{part}.weight" for part in ("encoder.embedding", "decoder.embedding", "projection")]
    assert len(named) == 3
    assert sum(int(size) for _, size in named) <= int(held) <= limit
    assert all(int(size) == 4 * 300_000 * 64 for _, size in named)
    assert any(weight in name for name, _ in named for weight in weights)
    assert [pid for pid in started.values() if Path(f"/proc/{pid}").exists()] == []


def test_a_plan_predicted_not_to_fit_is_refused_before_a_step_runs(
    profiled: tuple[OpGraph, Profile], tmp_path: Path, workers: ForkedWorkers
) -> None:
    """Two devices with less memory than the weights need: the error is the placer's, with numbers, and no worker ran out of anything."""
    _, profile = profiled
    profile.save(tmp_path / "cost.json")
    flags = [f"--cost_path={tmp_path / 'cost.json'}", "--device_memory=64MiB"]
    method = [*(f for f in FLAGS if "expert" not in f), "--placement_method=m_etf"]
    codes, out, err = workers.finish("baechi_on_processes", 2, *method, *flags)
    assert (codes[0], out) == (1, "")
    said = only_error(err)
    assert "ran out of memory" not in said
    assert "bytes" in said
    assert "parity" not in err
    assert "measuring" not in err
