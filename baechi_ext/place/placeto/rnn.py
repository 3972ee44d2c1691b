"""The RNN placer that Placeto is compared with: it learns one graph alone, and emits a device for one group of ops after the other.

Mirhoseini et al., "Device placement optimization with reinforcement learning" (ICML 2017), with the group embeddings of "A hierarchical
model for device placement" (ICLR 2018, section 3): a bidirectional LSTM reads the groups in topological order; an LSTM decoder with
additive attention (Bahdanau et al., ICLR 2015) gives each a device, and gets the embedding of the device before. REINFORCE: whole
plans are rewarded, here with the cost that Placeto's episodes lower.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from baechi_ext.errors import OptionError
from baechi_ext.place.placeto.lesson import Lesson
from baechi_ext.place.placeto.view import View

if TYPE_CHECKING:
    from torch import Generator, Tensor

MAX_NORM = 1.0
"""Of an update's gradient, as published."""


@dataclass(frozen=True, slots=True)
class RnnConfig:
    """What the network is made of, and how it learns."""

    hidden: int = 64
    """Of the LSTMs, in each direction."""
    device_width: int = 8
    """Of a device's embedding."""
    learning_rate: float = 3e-3
    entropy: float = 0.01
    """What staying undecided is worth."""
    seed: int = 0


class RnnPlacer:
    """The network for one graph and cluster, and its optimizer."""

    def __init__(self, lesson: Lesson, config: RnnConfig = RnnConfig()) -> None:  # noqa: B008 - frozen
        import torch

        self.lesson = lesson
        self.config = config
        self.groups = torch.from_numpy(group_features(lesson.tensors.view))
        self.generator = torch.Generator().manual_seed(config.seed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.layers = _layers(config, self.groups.shape[1], len(lesson.decisions.cluster))
        self.optimizer = torch.optim.Adam(self.layers.parameters(), lr=config.learning_rate)

    def run(self, evaluations: int) -> None:
        """Learns as long as whole batches of plans fit into so many simulated ones, after one with all on the fastest device.

        The best plans are `lesson.best`'s. Raises OptionError where no batch fits.
        """
        batch = self.lesson.environment.batch
        if evaluations < 2 * batch:
            raise OptionError(f"{evaluations} plans are too few for the RNN placer, which learns from {batch} at a time; allow {2 * batch}")
        self.lesson.judge(self.lesson.single())
        for _ in range(evaluations // batch - 1):
            self.update()

    def update(self) -> float:
        """A batch of plans and what they teach; returns their mean cost."""
        import torch

        plans, log_probabilities, entropy = self.drawn(self.lesson.environment.batch, self.generator)
        costs = torch.from_numpy(self.lesson.judge(plans.numpy()).astype(np.float32))
        gain = (costs.mean() - costs) / (costs.std(correction=0) + 1e-8)
        loss = -(log_probabilities.sum(dim=0) * gain).mean() / len(log_probabilities) - self.config.entropy * entropy
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.layers.parameters(), MAX_NORM)
        self.optimizer.step()
        return float(costs.mean())

    def drawn(self, batch: int, generator: "Generator") -> tuple["Tensor", "Tensor", "Tensor"]:
        """Plans (batch x group), the log-probabilities of their devices (group x batch), and the mean entropy of the choices."""
        import torch

        layers = self.layers
        encoded, (last, cell) = layers["encoder"](self.groups)
        keys = layers["key"](encoded)
        h, c = (x.flatten().expand(batch, -1) for x in (last, cell))
        before = torch.full((batch,), len(self.lesson.decisions.cluster), dtype=torch.long)
        devices, log_probabilities, entropies = [], [], []
        for group in encoded:
            h, c = layers["decoder"](torch.cat([layers["device"](before), group.expand(batch, -1)], dim=-1), (h, c))
            energy = layers["energy"]((keys + layers["query"](h).unsqueeze(1)).tanh()).squeeze(-1)
            context = energy.softmax(dim=-1) @ encoded
            chances = layers["score"](torch.cat([h, context], dim=-1)).log_softmax(dim=-1)
            before = torch.multinomial(chances.detach().exp(), 1, generator=generator).squeeze(-1)
            devices.append(before)
            log_probabilities.append(chances.gather(-1, before.unsqueeze(-1)).squeeze(-1))
            entropies.append(-(chances.exp() * chances).sum(dim=-1).mean())
        return torch.stack(devices, dim=1), torch.stack(log_probabilities), torch.stack(entropies).mean()


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
            "decoder": nn.LSTMCell(config.device_width + both, both),
            "device": nn.Embedding(devices + 1, config.device_width),  # the last one: none was chosen yet
            "key": nn.Linear(both, hidden),
            "query": nn.Linear(both, hidden),
            "energy": nn.Linear(hidden, 1),
            "score": nn.Linear(2 * both, devices),
        }
    )
