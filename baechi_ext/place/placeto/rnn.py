"""The RNN placer that Placeto is compared with: it learns one graph alone, and emits a device for one group of ops after the other.

Mirhoseini et al., "Device placement optimization with reinforcement learning" (ICML 2017), with the group embeddings of "A hierarchical
model for device placement" (ICLR 2018, section 3): a bidirectional LSTM reads the groups in topological order; an LSTM decoder with
attention gives each a device, and gets the embedding of the device before. REINFORCE: whole plans are rewarded, here with the cost
that Placeto's episodes lower. Attention is multiplicative (Luong, Pham and Manning, EMNLP 2015), not additive, and does not feed back into
the LSTM: so what a batch of plans teaches takes one pass of the LSTM, and no step after step.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from baechi_ext.errors import OptionError
from baechi_ext.place.placeto.decisions import View
from baechi_ext.place.placeto.training_task import TrainingTask

if TYPE_CHECKING:
    from torch import Generator, Tensor

MAX_NORM = 1.0
"""The largest norm of an update's gradient, as published."""


@dataclass(frozen=True, slots=True)
class RnnConfig:
    """The make of the network, and how it learns."""

    hidden: int = 64
    """The width of the LSTMs, in each direction."""
    device_width: int = 8
    """The width of a device's embedding."""
    learning_rate: float = 3e-3
    entropy: float = 0.01
    """The weight of the entropy: staying undecided is worth so much."""
    seed: int = 0


class RnnPlacer:
    """The network for one graph and cluster, and its optimizer."""

    def __init__(self, training: TrainingTask, config: RnnConfig = RnnConfig()) -> None:  # noqa: B008 - frozen
        import torch

        self.training = training
        self.config = config
        self.groups = torch.from_numpy(group_features(training.view))
        self.generator = torch.Generator().manual_seed(config.seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.layers = _layers(config, self.groups.shape[1], len(training.decisions.cluster))
        self.optimizer = torch.optim.Adam(self.layers.parameters(), lr=config.learning_rate)

    def run(self, evaluations: int) -> None:
        """Learns as long as whole batches of plans fit into so many simulated ones, after one with all on the fastest device.

        The best plans are `training.best`'s. Raises OptionError where no batch fits.
        """
        batch = self.training.environment.batch
        if evaluations < 2 * batch:
            raise OptionError(f"{evaluations} plans are too few for the RNN placer, which learns from {batch} at a time; allow {2 * batch}")
        self.training.judge(self.training.single())
        for _ in range(evaluations // batch - 1):
            self.update()

    def update(self) -> float:
        """A batch of plans and what they teach; returns their mean cost."""
        import torch

        plans = self.drawn(self.training.environment.batch, self.generator)
        costs = torch.from_numpy(self.training.judge(plans.numpy()).astype(np.float32))
        gain = (costs.mean() - costs) / (costs.std(correction=0) + 1e-8)
        chances = self.chances(plans)
        chosen = chances.gather(-1, plans.T.unsqueeze(-1)).squeeze(-1)
        entropy = -(chances.exp() * chances).sum(dim=-1).mean()
        loss = -(chosen.mean(dim=0) * gain).mean() - self.config.entropy * entropy
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.layers.parameters(), MAX_NORM)
        self.optimizer.step()
        return float(costs.mean())

    def drawn(self, batch: int, generator: "Generator") -> "Tensor":
        """Plans: batch x group."""
        import torch

        with torch.no_grad():
            encoded, state = self._encoded(batch)
            before = torch.full((batch,), len(self.training.decisions.cluster))
            devices = []
            for group in encoded:
                h, state = self.layers["decoder"](self._inputs(before.unsqueeze(0), group.view(1, -1)), state)
                chances = self._scored(h, encoded).exp().squeeze(0)
                before = torch.multinomial(chances, 1, generator=generator).squeeze(-1)
                devices.append(before)
        return torch.stack(devices, dim=1)

    def chances(self, plans: "Tensor") -> "Tensor":
        """Log-probabilities of all devices, group x batch x device, where the groups before have the devices of the plans."""
        encoded, state = self._encoded(len(plans))
        first = plans.new_full((1, len(plans)), len(self.training.decisions.cluster))
        h, _ = self.layers["decoder"](self._inputs(_joined([first, plans.T[:-1]]), encoded), state)
        return self._scored(h, encoded)

    def _encoded(self, batch: int) -> tuple["Tensor", tuple["Tensor", "Tensor"]]:
        """Group x feature, and where the decoder begins."""
        encoded, state = self.layers["encoder"](self.groups)
        h, c = (x.flatten().expand(1, batch, -1).contiguous() for x in state)
        return encoded, (h, c)

    def _inputs(self, before: "Tensor", groups: "Tensor") -> "Tensor":
        """The decoder's inputs: the device before and the group, group x batch x feature."""
        return _joined([self.layers["device"](before), groups.unsqueeze(1).expand(-1, before.shape[1], -1)], dim=-1)

    def _scored(self, h: "Tensor", encoded: "Tensor") -> "Tensor":
        energy = self.layers["query"](h) @ encoded.T / math.sqrt(encoded.shape[1])
        scores: Tensor = self.layers["score"](_joined([h, energy.softmax(dim=-1) @ encoded], dim=-1))
        return scores.log_softmax(dim=-1)


def _joined(parts: "list[Tensor]", dim: int = 0) -> "Tensor":
    import torch

    return torch.cat(parts, dim=dim)


def group_features(view: View) -> NDArray[np.float32]:
    """By decision: the mean of its ops' features, its number of ops, and for every other decision what it sends there and gets from it.

    What is sent is the transfer time in parts of the mean op's time, as a logarithm.
    """
    decisions = view.decisions
    unit_of, m = decisions.unit_of, len(decisions)
    count = np.bincount(unit_of, minlength=m).astype(np.float32)
    mean = np.zeros((m, view.op_features.shape[1]), np.float32)
    np.add.at(mean, unit_of, view.op_features)
    sent = np.zeros((m, m), np.float32)
    source, target, transfer = view.edges
    np.add.at(sent, (unit_of[source], unit_of[target]), np.expm1(transfer[:, 0]))
    np.fill_diagonal(sent, 0.0)
    return np.concatenate([mean / count[:, None], np.log1p(count)[:, None], np.log1p(sent), np.log1p(sent.T)], axis=1)


def _layers(config: RnnConfig, inputs: int, devices: int) -> Any:
    from torch import nn

    hidden, both = config.hidden, 2 * config.hidden
    return nn.ModuleDict(
        {
            "encoder": nn.LSTM(inputs, hidden, bidirectional=True),
            "decoder": nn.LSTM(config.device_width + both, both),
            "device": nn.Embedding(devices + 1, config.device_width),  # the last one: none was chosen yet
            "query": nn.Linear(both, both),
            "score": nn.Linear(2 * both, devices),
        }
    )
