"""A profile has real samples for every op, adds up, and leaves the step as it was."""

import pytest
import torch

from baechi_ext.cost import Profile, attach_costs
from baechi_ext.errors import MismatchError
from baechi_ext.ir.files import read_json
from runtime.profiler import ProfileOptions, profile_step
from runtime.thread_executor import ThreadExecutor
from runtime.torch_devices import cpu_devices
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


def test_profiling_changes_nothing() -> None:
    step = make_step("branches")
    graph, binding = capture(step)
    before, rng = step.snapshot(), torch.get_rng_state()
    with ThreadExecutor(cpu_devices(1), timeout_seconds=60) as executor:
        profile_step(executor, graph, binding, step, ProfileOptions(warmup=0, repeats=1))
    assert torch.equal(rng, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in step.state().items())


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
