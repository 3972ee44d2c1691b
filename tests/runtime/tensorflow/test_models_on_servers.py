"""The built-in models by every placement method: one step on two servers is one step unplaced, within 1e-5, in loss and all variables."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial

import pytest

from baechi_ext.cost import attach_costs
from baechi_ext.ir import Cluster, Link
from baechi_ext.place.common import PlaceOptions
from baechi_ext.place.registry import METHODS
from baechi_runtime.drivers import pipeline
from baechi_runtime.drivers.train_request import TrainRequest
from baechi_runtime.measure.parity_result import Parity
from baechi_runtime.models.registry import TENSORFLOW_MODELS, ModelOptions
from baechi_runtime.tensorflow.backend import capture, load
from baechi_runtime.tensorflow.coarse import COARSE, begins_coarse
from baechi_runtime.tensorflow.parity import TOLERANCE, check_parity
from baechi_runtime.tensorflow.profiler import ProfileOptions, profile
from baechi_runtime.tensorflow.servers.devices import Servers
from baechi_runtime.tensorflow.step import Captured
from tests.tensorflow_steps import narrow_layers

SMALL = {
    "inception_v3": ModelOptions(batch_size=1, image_size=75),
    "wide_towers": ModelOptions(batch_size=8, image_size=4, d_model=32, num_layers=2),
    "gnmt_v2": ModelOptions(batch_size=4, vocab_size=20, max_seq_length=5, rnn_units=8, num_layers=2, rnn_chunk=2, residual=True),
    "nasnet": ModelOptions(batch_size=2, image_size=32, nasnet_cells=1, nasnet_filters=4),
}
LARGE = ("inception_v3", "nasnet")
"""Models of keras.applications, whose graphs have thousands of ops, and which have no hints for `expert`."""
OF_LARGE = (("inception_v3", "m_sct"),)
"""The one of these that is tried each time; the others are `slow`."""
CASES = [
    pytest.param(n, method, marks=pytest.mark.slow if n in LARGE and (n, method) not in OF_LARGE else ())
    for n in TENSORFLOW_MODELS
    for method in sorted(METHODS)
    if not (n in LARGE and method == "expert")
]
CLUSTER = Cluster.uniform(2, link=Link(0.0002, 10.0, 20.0, 0.0002, 20.0, 0.0002))
"""Faster than servers are, so that plans split."""


@dataclass
class Model:
    """A captured and profiled step, and what was found out about its plans: many methods have the same one."""

    captured: Captured
    checked: dict[tuple[tuple[int, ...], ...], Parity] = field(default_factory=dict)
    """By the ops of each device, in their order."""


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with Servers(2) as servers:
        yield servers


@pytest.fixture(scope="module")
def model_of(servers: Servers) -> Callable[[str], Model]:
    """The model of a name, captured and profiled once; an indirect parameter would have it made anew for every method."""
    return cache(partial(_model, servers))


def _model(servers: Servers, name: str) -> Model:
    asked = TrainRequest(name, pipeline.PlanRequest(), SMALL[name], optimizer="momentum", framework="tensorflow")
    with narrow_layers():
        step, function = capture(asked)
    costs = profile(function, step.inputs, servers, ProfileOptions(warmup=1, repeats=1))
    together, alone = (attach_costs(function.graph, costs, contended=contended) for contended in (True, False))
    return Model(Captured(together, alone, costs, step, function, function.values()))


@pytest.mark.parametrize(("name", "method"), CASES)
def test_a_placed_step_is_an_unplaced_step(name: str, method: str, model_of: Callable[[str], Model], servers: Servers) -> None:
    model, asked = model_of(name), pipeline.PlanRequest(method, options=PlaceOptions(seed=0, time_limit_seconds=0.2))
    if begins_coarse(method):
        asked = replace(asked, grouper=COARSE[0], placer_type=COARSE[1])
    result = pipeline.plan(model.captured.graph, CLUSTER, asked)
    order = result.timeline.device_order()
    if order not in model.checked:
        with load(model.captured, result.timeline, servers) as session:
            model.checked[order] = check_parity(model.captured, session)
    parity = model.checked[order]
    assert parity.max_rel_diff <= TOLERANCE
    assert parity.compared == len(model.captured.first) + 1
