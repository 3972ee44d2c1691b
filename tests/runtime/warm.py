"""The work that processes that fork for the tests do once: each of their forks would take seconds for it.

They import what commands import, at once or when they come to it, and capture and place a small step: the first of a process imports and
compiles more.
"""

import importlib
from importlib.util import find_spec

from baechi_ext.ir import Cluster
from baechi_ext.place.common import PlaceOptions
from tests.build import graph_of

OF_ALL = (
    "networkx",
    "rich.live",
    "yaml",
    "baechi_runtime.cli.main",
    "baechi_runtime.drivers.comparing",
    "baechi_runtime.drivers.ranking",
    "baechi_runtime.drivers.training",
    "baechi_runtime.host.frameworks",
)
IMPORTED = {
    "torch": (
        "torch._functorch.aot_autograd",
        "torch.distributed.argparse_util",
        "torch.distributed.launcher.api",
        "torch.export._trace",
        "torch.nn.attention.flex_attention",
        "torch.profiler._cupti_monitor",
        "baechi_runtime.torch.backend",
        "baechi_runtime.torch.calls.comparing",
        "baechi_runtime.torch.calls.script",
        "baechi_runtime.sharding.ranked",
        "baechi_runtime.sharding.training",
    ),
    "tensorflow": (
        "baechi_runtime.models.tensorflow.wide_towers",
        "baechi_runtime.tensorflow.backend",
        "baechi_runtime.tensorflow.calls.script",
    ),
}
OF_TRANSFORMERS = ("transformers.models.gpt2.modeling_gpt2",)


def warm_up(framework: str) -> None:
    """Imports what commands with this framework do, and has a step planned."""
    transformers = OF_TRANSFORMERS if framework == "torch" and find_spec("transformers") is not None else ()
    for name in (*OF_ALL, *IMPORTED[framework], *transformers):
        importlib.import_module(name)
    plan_a_graph()
    if framework == "torch":
        torch = importlib.import_module("torch")
        torch.compiler.reset()  # imports TorchDynamo
        if torch.version.cuda is None:  # a build for CUDA starts autograd's threads for GPUs in captures, without which forks can't go on
            capture_a_step()


def plan_a_graph() -> None:
    """Two chains of ops, between which tensors go, by a method that tries others and improves what they find."""
    from baechi_runtime.drivers.pipeline import PlanRequest, plan

    names = [(letter, i) for letter in "ab" for i in range(4)]
    edges = [(f"{a}{i}", f"{b}{i + 1}", 8) for a in "ab" for b in "ab" for i in range(3)]
    graph = graph_of({f"{letter}{i}": 5.0 + i for letter, i in names}, *edges)
    for method in ("m_etf", "m_sct", "auto"):
        plan(graph, Cluster.uniform(2), PlanRequest(method=method, options=PlaceOptions(seed=0, time_limit_seconds=0.1)))


def capture_a_step() -> None:
    from torch.random import fork_rng

    from baechi_ext.capture.torch_joint import CaptureOptions, capture_joint
    from baechi_runtime.models.registry import ModelOptions, make_step
    from baechi_runtime.models.training_step import optimizer_spec

    with fork_rng():
        step = make_step("wide_towers", ModelOptions(batch_size=2, image_size=8), optimizer_spec("adam", 0.001))
        capture_joint(step.module, step.inputs, CaptureOptions("adam", 1), step.name)
