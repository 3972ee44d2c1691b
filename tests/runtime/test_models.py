"""The built-in models, for real: their size, parity of every method's plan on 1, 2 and 4 devices, and twenty equal losses."""

import sys
from dataclasses import fields, replace

import pytest
import torch

from baechi_ext.capture.torch_joint import CaptureOptions, capture_joint
from baechi_ext.cost import attach_costs
from baechi_ext.errors import MissingBackendError, OptionError
from baechi_ext.ir import Cluster, Link
from baechi_runtime.drivers import pipeline
from baechi_runtime.models.registry import MODELS, ModelOptions, code_of, make_step
from baechi_runtime.models.training_step import EagerStep, TrainingStep, optimizer_spec
from baechi_runtime.torch.lowering.devices import cpu_devices
from baechi_runtime.torch.parity import check_parity
from baechi_runtime.torch.profiler import ProfileOptions, profile_step
from baechi_runtime.torch.threads.executor import ThreadExecutor
from tests.torch_steps import SMALL_MODELS, narrow_step

METHODS = {1: ("single",), 2: ("m_sct", "m_etf", "m_topo", "contiguous"), 4: ("m_sct",)}
EXPERTS = {"wide_towers", "gnmt_v2"}
"""Models with hints where an expert would put their layers."""
LIKE_OTHERS = {"resnet101"}
"""Large models without a structure that the others lack."""


@pytest.fixture(scope="module", params=[pytest.param(name, marks=[pytest.mark.slow] if name in LIKE_OTHERS else []) for name in MODELS])
def captured(request):
    """(step, costed graph, binding) of a model at a small size, profiled for real."""
    step = narrow_step(request.param, SMALL_MODELS[request.param], optimizer_spec("momentum", 0.01))
    graph, binding = capture_joint(step.module, step.inputs, CaptureOptions("momentum", 1), request.param)
    with ThreadExecutor(cpu_devices(1), timeout_seconds=120) as executor:
        profile = profile_step(executor, graph, binding, step, ProfileOptions(warmup=1, repeats=2))
    return step, attach_costs(graph, profile), binding


def plan(graph, method: str, num_devices: int):
    cluster = Cluster.uniform(num_devices, link=Link(0.0, 30.0), parallel_transfers=True)
    return pipeline.plan(graph, cluster, pipeline.PlanRequest(method=method))


PUBLISHED = {
    "resnet101": (ModelOptions(), 44_549_160),
    "alexnet": (ModelOptions(), 61_100_840),
    "transformer": (ModelOptions(vocab_size=37_000), 63_082_496),
    "gpt2": (ModelOptions(vocab_size=50_257, max_seq_length=1024, num_layers=12, d_model=768, num_heads=12), 124_439_808),
    "rnnlm": (ModelOptions(rnn_units=1500), 66_022_000),
}
"""Models at the sizes of their papers, and the parameters these have, tied ones once. Of the Transformer the paper says 65 M, with about
37,000 words; its layers have 6 * (3,152,384 + 4,204,032)."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name: str) -> None:
    options, expected = PUBLISHED[name]
    with torch.device("meta"):
        step = make_step(name, options, optimizer_spec("sgd", 0.1))
    assert sum(p.numel() for p in step.module.parameters()) == expected


@pytest.mark.parametrize("name", MODELS)
def test_examples_stand_where_the_step_says(name: str) -> None:
    step = narrow_step(name, replace(SMALL_MODELS[name], batch_size=11), optimizer_spec("sgd", 0.1))
    assert step.batch == 11
    assert [tuple(value.shape).index(11) for value in step.inputs] == [step.batch_dim] * len(step.inputs)


def test_parameters() -> None:
    inception = make_step("inception_v3", ModelOptions(), optimizer_spec("sgd", 0.1))
    assert sum(p.numel() for p in inception.module.parameters()) == 23_834_568
    assert [tuple(i.shape) for i in inception.inputs] == [(32, 3, 299, 299), (32,)]
    towers = make_step("wide_towers", ModelOptions(), optimizer_spec("sgd", 0.1))
    tower = (3 * 9 + 1) * 96 + 4 * (96 * 9 + 1) * 96 + 5 * 2 * 96
    assert sum(p.numel() for p in towers.module.parameters()) == 4 * tower + (4 * 96 + 1) * 10
    assert [tuple(i.shape) for i in towers.inputs] == [(8, 3, 64, 64), (8,)]


@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_parity(captured, num_devices: int) -> None:
    step, graph, binding = captured
    with ThreadExecutor(cpu_devices(num_devices), timeout_seconds=120) as executor:
        for method in (*METHODS[num_devices], *(["expert"] if num_devices > 1 and step.name in EXPERTS else [])):
            result = plan(graph, method, num_devices)
            if num_devices > 1:
                assert len(set(result.plan.placement)) > 1, f"{method} uses one device"
            parity = check_parity(executor, result.timeline, binding, step)
            assert (parity.passed, parity.max_abs_diff) == (True, 0.0), (method, parity)


def test_twenty_losses_are_equal(captured) -> None:
    step, graph, binding = captured
    saved = step.snapshot()
    curves = {"placed": losses(captured, True), "eager": losses(captured, False)}
    assert curves["placed"] == curves["eager"]
    assert len(set(curves["eager"])) >= 8
    assert curves["eager"][-1] < curves["eager"][0]
    assert all(torch.equal(v, saved[n]) for n, v in step.state().items())


def losses(captured: tuple, placed: bool) -> list[float]:
    step, graph, binding = captured
    saved = step.snapshot()
    with ThreadExecutor(cpu_devices(2), timeout_seconds=120) as executor:
        loaded = executor.load(plan(graph, "m_sct", 2).timeline, binding, step) if placed else None
        eager = EagerStep(step, torch.device("cpu"))
        torch.manual_seed(5)
        curve = [(executor.call(0, eager.run) if loaded is None else loaded.run()[0]).item() for _ in range(20)]
    step.restore(saved)
    eager.optimizer.zero_grad()
    return curve


def test_wrong_models_and_sizes_say_what_is_right() -> None:
    spec = optimizer_spec("sgd", 0.1)
    with pytest.raises(OptionError, match="unknown model 'vgg'; choose one of inception_v3, wide_towers, gnmt_v2, nasnet, "):
        make_step("vgg", ModelOptions(), spec)
    with pytest.raises(OptionError, match="--image_size=74 is too small for inception_v3; it takes 75 pixels or more"):
        make_step("inception_v3", ModelOptions(image_size=74), spec)
    for name, least in (("resnet101", 32), ("alexnet", 63)):
        with pytest.raises(OptionError, match=f"is too small for {name}; it takes {least} pixels or more"):
            make_step(name, ModelOptions(image_size=least - 1), spec)
    for name, options, known in (
        ("gnmt_v2", ModelOptions(rnn_unit_type="x"), "--rnn_unit_type=x is unknown; choose one of lstm, gru"),
        ("rnnlm", ModelOptions(rnn_unit_type="x"), "--rnn_unit_type=x is unknown; choose one of lstm, gru"),
        ("gnmt_v2", ModelOptions(encoder_type="x"), "--encoder_type=x is unknown; choose one of gnmt, bi, uni"),
    ):
        with pytest.raises(OptionError, match=known):
            make_step(name, options, spec)
    with pytest.raises(OptionError, match="--d_model=30 does not suit --num_heads=4; it takes a multiple of that"):
        make_step("transformer", ModelOptions(d_model=30, num_heads=4), spec)
    with pytest.raises(OptionError, match="unknown optimizer 'lion'; choose one of sgd, momentum"):
        optimizer_spec("lion", 0.1)


def test_without_transformers_gpt2_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingBackendError, match=r"the model gpt2 needs transformers .*; pip install 'baechi-ext\[transformers\]'"):
        make_step("gpt2", ModelOptions(), optimizer_spec("sgd", 0.1))


def test_an_option_of_another_model_is_refused() -> None:
    for name, options, message in (
        ("inception_v3", ModelOptions(vocab_size=9), "--vocab_size is not an option of inception_v3; it is one of gnmt_v2, "),
        ("gnmt_v2", ModelOptions(image_size=9), "--image_size is not an option of gnmt_v2; it is one of inception_v3, wide_towers"),
        ("wide_towers", ModelOptions(large=True), "--large is not an option of wide_towers; it is one of nasnet"),
    ):
        with pytest.raises(OptionError, match=message):
            make_step(name, options, optimizer_spec("sgd", 0.1))
    assert make_step("wide_towers", ModelOptions(num_devices=4), optimizer_spec("sgd", 0.1)).name == "wide_towers"


@pytest.mark.parametrize("name", MODELS)
def test_the_registry_lists_what_a_model_takes(name: str) -> None:
    taken = {f.name for f in fields(code_of(name).Options)}
    assert taken == set(MODELS[name].takes)
    assert taken <= {f.name for f in fields(ModelOptions)}


@pytest.mark.parametrize("name", MODELS)
def test_same_seed_same_step(name: str) -> None:
    a, b = (make_step(name, SMALL_MODELS[name], optimizer_spec("sgd", 0.1)) for _ in range(2))
    assert isinstance(a, TrainingStep)
    assert all(torch.equal(x, y) for x, y in zip(a.inputs, b.inputs, strict=True))
    assert all(torch.equal(v, b.state()[n]) for n, v in a.state().items())


def test_the_batch_of_a_model_is_known_without_its_flag() -> None:
    """NASNet's goes by its size."""
    step = make_step("nasnet", ModelOptions(nasnet_cells=1, nasnet_filters=4), optimizer_spec("sgd", 0.1))
    assert step.batch == len(step.inputs[0]) == len(step.inputs[-1]) == 8


def test_an_eager_step_elsewhere_has_weights_of_its_own() -> None:
    step = make_step("rnnlm", ModelOptions(batch_size=2, vocab_size=8, rnn_units=4, max_seq_length=4), optimizer_spec("sgd", 0.1))
    here, elsewhere = (EagerStep(step, torch.device(kind)) for kind in ("cpu", "meta"))
    assert [w.device.type for w in here.weights] == ["cpu"] * len(step.state())
    assert [w.device.type for w in elsewhere.weights] == ["meta"] * len(step.state())
