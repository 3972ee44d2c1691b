"""The policy: scores for all devices of a cluster, however many, from one set of weights.

An op's embedding is computed once an episode, from what never changes. For the current decision each device is scored by itself: from the
decision's embedding, from those of its ancestors, descendants and parallel decisions that are on this device, from what the environment
observes of it, and from the mean of what is made of all devices.
"""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from baechi_ext.place.placeto.decisions import OP_FEATURES, RELATIONS, View
from baechi_ext.place.placeto.embedding import Parameters, Shapes, Size, draw, embed, embedding_shapes, linear, tensors
from baechi_ext.place.placeto.environment_kernel import FEATURES

if TYPE_CHECKING:
    import torch
    from torch import Tensor


EMBEDDED = {"embedding": "rounds", "every_step": False}
"""The one way in which policies embed ops, as their files say it."""


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """The make of a policy; with the same one, the same file fits."""

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

    @property
    def size(self) -> Size:
        """The sizes of the embedding."""
        return Size(len(self.op_features), self.width, self.rounds)

    def shapes(self) -> Shapes:
        """All layers."""
        head = {f"head.{relation}": (self.width, self.hidden) for relation in RELATIONS}
        head |= {"head.own": (self.width, self.hidden), "head.device": (len(self.device_features), self.hidden)}
        head |= {"head.each": (self.hidden, self.hidden), "head.all": (self.hidden, self.hidden), "head.score": (self.hidden, 1)}
        return embedding_shapes(self.size) | head

    def to_json(self) -> dict[str, Any]:
        return EMBEDDED | asdict(self)


class States(NamedTuple):
    """The states that a policy sees, a row each."""

    current: "torch.Tensor"
    """The decision whose turn it is."""
    features: "torch.Tensor"
    """Row x device x FEATURES."""
    devices: "torch.Tensor"
    """Row x decision: the plan as it stands."""

    def rows(self, index: "Tensor | slice") -> "States":
        return States(self.current[index], self.features[index], self.devices[index])


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

    def embedded(self, view: View) -> "Tensor":
        """By decision, the mean of its ops' embeddings: decision x width."""
        x, unit_of = tensors((view.op_features, view.decisions.unit_of.astype(np.int64)))
        h = embed(self.parameters, view, x, self.config.size)
        m = len(view.decisions)
        count = h.new_zeros(m).index_add_(0, unit_of, h.new_ones(len(unit_of))).unsqueeze(-1)
        return h.new_zeros(m, h.shape[-1]).index_add_(0, unit_of, h) / count

    def logits(self, view: View, states: States, h: "Tensor") -> "Tensor":
        """A score for every device, row x device; `h` is what is `embedded`."""
        k, own = states.features.shape[1], h[states.current]
        hidden = linear(self.parameters, "head.device", states.features) + linear(self.parameters, "head.own", own).unsqueeze(1)
        ids = states.devices.new_tensor(range(k)).view(1, k, 1)
        there = (states.devices.unsqueeze(1) == ids).to(h.dtype)
        for relation, weights in zip(RELATIONS, tensors(view.relations), strict=True):
            pooled = (there * weights[states.current].unsqueeze(1)) @ h
            hidden = hidden + linear(self.parameters, f"head.{relation}", pooled)
        hidden = hidden.relu()
        hidden = linear(self.parameters, "head.each", hidden) + linear(self.parameters, "head.all", hidden.mean(dim=1, keepdim=True))
        return linear(self.parameters, "head.score", hidden.relu()).squeeze(-1)
