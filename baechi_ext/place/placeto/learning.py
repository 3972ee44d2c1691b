"""Episodes of a policy, and learning from them: advantages over their mean at each step, and the losses of REINFORCE and PPO."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from baechi_ext.place.placeto.decisions import View
from baechi_ext.place.placeto.environment import Environment
from baechi_ext.place.placeto.policy import Policy, States

if TYPE_CHECKING:
    from torch import Generator, Tensor


@dataclass(frozen=True)
class Rollout:
    """A batch of whole episodes on one graph; rows are steps, and within a step episodes."""

    view: View
    states: States
    actions: "Tensor"
    log_probabilities: "Tensor"
    """The log-probabilities of the actions when they were chosen."""
    rewards: "Tensor"
    """Step x episode."""


def run_episodes(policy: Policy, view: View, environment: Environment, generator: "Generator | None", likeliest: int = 0) -> Rollout:
    """Episodes from where the environment was reset to; actions are drawn, or without a generator the likeliest are taken.

    The first `likeliest` episodes take the likeliest in any case.
    """
    import torch

    seen, actions, log_probabilities, rewards = [], [], [], []
    with torch.no_grad():
        embedded = policy.embedded(view)
        while not environment.done:
            state = observed(environment)
            chances = policy.logits(view, state, embedded).log_softmax(dim=-1)
            if generator is None:
                action = chances.argmax(dim=-1)
            else:
                action = torch.multinomial(chances.exp(), 1, generator=generator).squeeze(-1)
                action[:likeliest] = chances[:likeliest].argmax(dim=-1)
            seen.append(state)
            actions.append(action)
            log_probabilities.append(chances.gather(-1, action.unsqueeze(-1)).squeeze(-1))
            rewards.append(environment.step(action.numpy()))
    states = States(
        torch.cat([s.current for s in seen]),
        torch.cat([s.features for s in seen]),
        torch.cat([s.devices for s in seen]),
    )
    return Rollout(view, states, torch.cat(actions), torch.cat(log_probabilities), torch.from_numpy(np.stack(rewards).astype(np.float32)))


def observed(environment: Environment) -> States:
    """The environment's states as the policy sees them, a row for each episode."""
    import torch

    batch = environment.batch
    return States(
        current=torch.full((batch,), environment.current, dtype=torch.long),
        features=torch.from_numpy(environment.observe().copy()),
        devices=torch.from_numpy(environment.devices.copy()),
    )


_MOST_NUMBERS = 2**24  # in the largest tensor of one update; of longer rollouts a random part of the steps is taken


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


def loss(algorithm: str, policy: Policy, rollout: Rollout, advantage: "Tensor", weights: LossWeights, generator: "Generator") -> "Tensor":
    """The loss of a rollout with its advantages, or of as many of its steps as memory is meant to hold."""
    import torch

    rows = torch.randperm(len(rollout.actions), generator=generator)[: _most_rows(rollout)]
    chances = policy.logits(rollout.view, rollout.states.rows(rows), policy.embedded(rollout.view)).log_softmax(dim=-1)
    new = chances.gather(-1, rollout.actions[rows].unsqueeze(-1)).squeeze(-1)
    entropy = -(chances.exp() * chances).sum(dim=-1).mean()
    return ALGORITHMS[algorithm](new, rollout.log_probabilities[rows], advantage.flatten()[rows], weights.clip) - weights.entropy * entropy


def _most_rows(rollout: Rollout) -> int:
    return max(1, _MOST_NUMBERS // (len(rollout.view.decisions) * rollout.states.features.shape[1]))
