"""Small real training steps for the tests of capture and runtime."""

import random
from unittest.mock import patch

import torch
from torch import Tensor, nn

from baechi_ext.capture.parts import Parts, shared_sizes
from baechi_ext.capture.torch_joint import Binding, CaptureOptions, capture_joint
from baechi_ext.capture.torch_parts import capture_parts
from baechi_ext.ir import Cluster, OpGraph
from baechi_ext.simulate import Timeline, simulate
from baechi_runtime.models import registry
from baechi_runtime.models.registry import ModelOptions
from baechi_runtime.models.torch import alexnet, inception_v3
from baechi_runtime.models.training_step import OptimizerSpec, TrainingStep, WithLoss, optimizer_spec

SMALL_MODELS = {
    "inception_v3": ModelOptions(batch_size=2, image_size=75),
    "wide_towers": ModelOptions(batch_size=2, image_size=16),
    "gnmt_v2": ModelOptions(batch_size=16, vocab_size=60, max_seq_length=8, rnn_units=64, rnn_chunk=4, num_layers=4, residual=True),
    "nasnet": ModelOptions(batch_size=4, image_size=16, nasnet_cells=1, nasnet_filters=8),
    "transformer": ModelOptions(batch_size=4, vocab_size=60, max_seq_length=6, num_layers=2, d_model=32, d_ff=64, num_heads=4),
    "gpt2": ModelOptions(batch_size=4, vocab_size=60, max_seq_length=6, num_layers=2, d_model=32, num_heads=4),
    "resnet101": ModelOptions(batch_size=4, image_size=32, resnet_filters=4),
    "alexnet": ModelOptions(batch_size=2, image_size=63),
    "rnnlm": ModelOptions(batch_size=8, vocab_size=60, max_seq_length=8, num_layers=2, rnn_units=64, rnn_chunk=4),
}
"""The built-in models at sizes that keep their structure."""


class Narrow(inception_v3.ConvNorm):
    """A layer of Inception with a quarter of its channels."""

    def __init__(self, inputs: int, outputs: int, *window: int | tuple[int, int], **options: int | tuple[int, int]) -> None:
        super().__init__(inputs if inputs == 3 else inputs // 4, outputs // 4, *window, **options)


def narrow_step(name: str, options: ModelOptions, optimizer: OptimizerSpec) -> TrainingStep:
    """A built-in model's step with narrow layers also where no option makes them so: the same ops in less time."""
    narrowed = {"ConvNorm": Narrow, "FEATURES": inception_v3.FEATURES // 4}
    with patch.object(alexnet, "UNITS", 64), patch.multiple(inception_v3, **narrowed):
        return registry.make_step(name, options, optimizer)


class Branches(nn.Module):
    """Two convolutional branches with BatchNorm, joined; dropout; a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3))
        self.right = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3))
        self.last = nn.Linear(8 * 36, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat([self.left(x), self.right(x)], dim=1).flatten(1))


class Tied(nn.Module):
    """An embedding whose weight is also the output layer's; views, chunks and a mean between."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.mix = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(8)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        a, b = self.mix(self.embedding(tokens)).chunk(2, dim=-1)
        return self.out(self.norm(torch.sigmoid(a) * b).mean(dim=1))


def make_step(name: str, optimizer: str = "sgd") -> TrainingStep:
    """The step "branches" or "tied" with weights and inputs from a fixed seed."""
    torch.manual_seed(7)
    if name == "branches":
        model, inputs = Branches(), (torch.randn(4, 3, 8, 8), torch.randint(5, (4,)))
    else:
        model, inputs = Tied(), (torch.randint(11, (6, 4)), torch.randint(11, (6,)))
    return TrainingStep(name, WithLoss(model), inputs, optimizer_spec(optimizer, 0.05), seed=3, batch=len(inputs[1]))


def capture(step: TrainingStep, **options: bool) -> tuple[OpGraph, Binding]:
    spec = step.optimizer
    return capture_joint(step.module, step.inputs, CaptureOptions(spec.name, spec.slots, **options), step.name)


def in_parts(step: TrainingStep, count: int, *, batch_norm_per_part: bool = False) -> tuple[OpGraph, Binding]:
    """The step over so many parts of its batch."""
    spec = step.optimizer
    sizes = shared_sizes(step.batch or 0, [1] * count)
    parts = Parts.of(step.inputs, sizes, step.batch_dim, batch_norm_per_part=batch_norm_per_part)
    return capture_parts(step.module, capture(step)[1], CaptureOptions(spec.name, spec.slots), parts, step.name)


def scattered(graph: OpGraph, num_devices: int, seed: int) -> Timeline:
    """A random legal placement in a random legal order: every op that may run elsewhere does, sooner or later."""
    draw = random.Random(seed)
    home: dict[str, int] = {}
    placement = [
        draw.randrange(num_devices) if op.colocation is None else home.setdefault(op.colocation, draw.randrange(num_devices))
        for op in graph.ops
    ]
    return simulate(graph, Cluster.uniform(num_devices), placement, [draw.random() for _ in graph.ops])
