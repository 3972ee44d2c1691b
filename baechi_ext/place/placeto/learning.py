"""Learning from episodes: advantages over its own mean at each step, and the losses of REINFORCE and PPO."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baechi_ext.place.placeto.policy import Policy
from baechi_ext.place.placeto.rollout import Rollout

if TYPE_CHECKING:
    from torch import Generator, Tensor

_MOST_NUMBERS = 2**24
"""In the largest tensor of one update; of longer rollouts a random part of the steps is taken."""


@dataclass(frozen=True, slots=True)
class LossWeights:
    """The weights in the loss of one update."""

    entropy: float
    """The more, the longer the policy stays undecided."""
    clip: float
    """PPO: a probability may leave its old value by this part before it no longer counts."""


def advantages(rewards: "Tensor", discount: float) -> "Tensor":
    """By step and episode, how much more the rewards from there on are worth than was to be expected.

    Expected is the mean of all episodes at that step, and less where an episode has gained more already: a good plan leaves less to
    gain, for which its next action is not to blame (a linear fit over all steps). Divided by their standard deviation, so that
    graphs count alike. `discount` is how much less a reward is worth a step later.
    """
    worth = rewards.clone()
    for i in range(len(rewards) - 2, -1, -1):
        worth[i] += discount * worth[i + 1]
    gained = rewards.cumsum(dim=0) - rewards
    found, gained = (x - x.mean(dim=1, keepdim=True) for x in (worth, gained))
    found = found - gained * ((found * gained).sum() / (gained.square().sum() + 1e-12))
    return found / (found.std(correction=0) + 1e-8)


def reinforce(new: "Tensor", old: "Tensor", advantage: "Tensor", clip: float) -> "Tensor":
    """Williams (Machine Learning 8, 1992): log-probabilities in proportion to advantages."""
    return -(new * advantage).mean()


def ppo(new: "Tensor", old: "Tensor", advantage: "Tensor", clip: float) -> "Tensor":
    """Schulman et al. (arXiv 1707.06347): ratios of probabilities, clipped where they have changed enough."""
    ratio = (new - old).exp()
    return -(ratio * advantage).minimum(ratio.clamp(1 - clip, 1 + clip) * advantage).mean()


ALGORITHMS: dict[str, Callable[["Tensor", "Tensor", "Tensor", float], "Tensor"]] = {"reinforce": reinforce, "ppo": ppo}


def loss(algorithm: str, policy: Policy, training: tuple[Rollout, "Tensor"], weights: LossWeights, generator: "Generator") -> "Tensor":
    """The loss of a rollout with its advantages, or of as many of its steps as memory is meant to hold."""
    import torch

    rollout, advantage = training
    rows = torch.randperm(len(rollout.actions), generator=generator)[: _most_rows(policy, rollout)]
    embedded = None if policy.config.every_step else policy.embedded(rollout.graph)
    chances = policy.logits(rollout.graph, rollout.states.rows(rows), embedded).log_softmax(dim=-1)
    new = chances.gather(-1, rollout.actions[rows].unsqueeze(-1)).squeeze(-1)
    entropy = -(chances.exp() * chances).sum(dim=-1).mean()
    return ALGORITHMS[algorithm](new, rollout.log_probabilities[rows], advantage.flatten()[rows], weights.clip) - weights.entropy * entropy


def _most_rows(policy: Policy, rollout: Rollout) -> int:
    decisions = rollout.graph.view.decisions
    a_row = len(decisions) * rollout.states.features.shape[1]
    if policy.config.every_step:
        a_row = max(a_row, policy.config.width * max(len(decisions.graph), len(rollout.graph.edges[0])))
    return max(1, _MOST_NUMBERS // a_row)
