"""The policy: scores for all devices of a cluster, however many, from one set of weights.

An op's embedding is computed once an episode from what never changes, or at every step from the state as well, as published. For the
current decision each device is scored by itself: from the decision's embedding, from those of its ancestors, descendants and parallel
decisions that are on this device, from what the environment observes of it, and from the mean of what is made of all devices.
"""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from baechi_ext.errors import OptionError
from baechi_ext.place.placeto.decisions import DYNAMIC_FEATURES, OP_FEATURES, RELATIONS, View
from baechi_ext.place.placeto.embedding import EMBEDDINGS, Parameters, Shapes, Size, draw, linear, tensors
from baechi_ext.place.placeto.environment_kernel import FEATURES

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """The make of a policy; with the same one, the same file fits."""

    embedding: str = "rounds"
    """A key of EMBEDDINGS."""
    every_step: bool = False
    """True where ops are embedded at every step, with DYNAMIC_FEATURES, and not once an episode."""
    width: int = 16
    """The width of an op's embedding."""
    rounds: int = 4
    """The number of edges that an embedding looks over."""
    hidden: int = 64
    """Width of the head."""
    visits: int = 1
    """The visits of each decision in the episodes that it was trained in, and is to be used in."""
    op_features: tuple[str, ...] = OP_FEATURES
    device_features: tuple[str, ...] = FEATURES

    def __post_init__(self) -> None:
        if self.embedding not in EMBEDDINGS:
            raise OptionError(f"unknown embedding {self.embedding!r} of a policy; choose one of {', '.join(EMBEDDINGS)}")

    @property
    def size(self) -> Size:
        """The sizes of the embedding."""
        return Size(len(self.op_features) + len(DYNAMIC_FEATURES) * self.every_step, self.width, self.rounds)

    def shapes(self) -> Shapes:
        """All layers."""
        head = {f"head.{relation}": (self.width, self.hidden) for relation in RELATIONS}
        head |= {"head.own": (self.width, self.hidden), "head.device": (len(self.device_features), self.hidden)}
        head |= {"head.each": (self.hidden, self.hidden), "head.all": (self.hidden, self.hidden), "head.score": (self.hidden, 1)}
        return EMBEDDINGS[self.embedding].shapes(self.size) | head

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class States(NamedTuple):
    """The states that a policy sees, a row each."""

    current: "torch.Tensor"
    """The decision whose turn it is."""
    features: "torch.Tensor"
    """Row x device x FEATURES."""
    devices: "torch.Tensor"
    """Row x decision: the plan as it stands."""
    dynamic: "torch.Tensor | None"
    """Row x op x DYNAMIC_FEATURES, for a policy that embeds at every step."""

    def rows(self, index: "Tensor | slice") -> "States":
        dynamic = None if self.dynamic is None else self.dynamic[index]
        return States(self.current[index], self.features[index], self.devices[index], dynamic)


@dataclass(frozen=True)
class Policy:
    """Parameters and what they belong to."""

    config: PolicyConfig
    parameters: Parameters

    @classmethod
    def fresh(cls, config: PolicyConfig, seed: int) -> "Policy":
        """A policy that knows nothing: all devices are about equally likely."""
        parameters = draw(config.shapes(), seed)
        parameters["head.score.weight"] *= 0.1
        return cls(config, parameters)

    def embedded(self, view: View, dynamic: "Tensor | None" = None) -> "Tensor":
        """By decision, the mean of its ops' embeddings: decision x width, or row x decision x width where the state counts."""
        x, unit_of = tensors((view.op_features, view.decisions.unit_of.astype(np.int64)))
        if dynamic is not None:
            fixed = x.expand(len(dynamic), *x.shape)
            x = dynamic.new_zeros(*dynamic.shape[:2], x.shape[1] + dynamic.shape[2])
            x[..., : fixed.shape[-1]], x[..., fixed.shape[-1] :] = fixed, dynamic
        h = EMBEDDINGS[self.config.embedding].apply(self.parameters, view, x, self.config.size)
        m = len(view.decisions)
        count = h.new_zeros(m).index_add_(0, unit_of, h.new_ones(len(unit_of))).unsqueeze(-1)
        return h.new_zeros(*h.shape[:-2], m, h.shape[-1]).index_add_(-2, unit_of, h) / count

    def logits(self, view: View, states: States, embedded: "Tensor | None" = None) -> "Tensor":
        """A score for every device, row x device. `embedded` is known where it does not depend on the state."""
        h = embedded if embedded is not None else self.embedded(view, states.dynamic)
        k = states.features.shape[1]
        own = h[states.current] if h.dim() == 2 else h[range(len(h)), states.current]
        hidden = linear(self.parameters, "head.device", states.features) + linear(self.parameters, "head.own", own).unsqueeze(1)
        ids = states.devices.new_tensor(range(k)).view(1, k, 1)
        there = (states.devices.unsqueeze(1) == ids).to(h.dtype)
        for relation, weights in zip(RELATIONS, tensors(view.relations), strict=True):
            pooled = (there * weights[states.current].unsqueeze(1)) @ h
            hidden = hidden + linear(self.parameters, f"head.{relation}", pooled)
        hidden = hidden.relu()
        hidden = linear(self.parameters, "head.each", hidden) + linear(self.parameters, "head.all", hidden.mean(dim=1, keepdim=True))
        return linear(self.parameters, "head.score", hidden.relu()).squeeze(-1)
