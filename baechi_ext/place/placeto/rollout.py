"""Episodes of a policy: what it saw, what it did, and what that gained."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from baechi_ext.place.placeto.embedding import GraphTensors
from baechi_ext.place.placeto.environment import Environment
from baechi_ext.place.placeto.policy import Policy, States

if TYPE_CHECKING:
    from torch import Generator, Tensor


@dataclass(frozen=True)
class Rollout:
    """A batch of whole episodes on one graph; rows are steps, and within a step episodes."""

    graph: GraphTensors
    states: States
    actions: "Tensor"
    log_probabilities: "Tensor"
    """The log-probabilities of the actions when they were chosen."""
    rewards: "Tensor"
    """Step x episode."""


def run_episodes(
    policy: Policy, graph: GraphTensors, environment: Environment, generator: "Generator | None", likeliest: int = 0
) -> Rollout:
    """Episodes from where the environment was reset to; actions are drawn, or without a generator the likeliest are taken.

    The first `likeliest` episodes take the likeliest in any case.
    """
    import torch

    seen, actions, log_probabilities, rewards = [], [], [], []
    with torch.no_grad():
        embedded = None if policy.config.every_step else policy.embedded(graph)
        while not environment.done:
            state = observed(policy, graph, environment)
            chances = policy.logits(graph, state, embedded).log_softmax(dim=-1)
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
        torch.cat([s.dynamic for s in seen if s.dynamic is not None]) if policy.config.every_step else None,
    )
    return Rollout(
        graph, states, torch.cat(actions), torch.cat(log_probabilities), torch.from_numpy(np.stack(rewards).astype(np.float32))
    )


def observed(policy: Policy, graph: GraphTensors, environment: Environment) -> States:
    """The environment's states as the policy sees them, a row for each episode."""
    import torch

    batch = environment.batch
    return States(
        current=torch.full((batch,), environment.current, dtype=torch.long),
        features=torch.from_numpy(environment.observe().copy()),
        devices=torch.from_numpy(environment.devices.copy()),
        dynamic=torch.from_numpy(_dynamic(environment)) if policy.config.every_step else None,
    )


def _dynamic(environment: Environment) -> np.ndarray:
    """Row x op x DYNAMIC_FEATURES."""
    unit_of, u, devices = environment.decisions.unit_of, environment.current, environment.devices
    first_us = environment.start_us[:, environment.decisions.units[u]].min(axis=1, keepdims=True)
    start = (environment.start_us - first_us) / np.maximum(environment.makespans_us, 1e-9)[:, None]
    visited = np.broadcast_to(environment.visited[unit_of], start.shape)
    current = np.broadcast_to(unit_of == u, start.shape)
    with_current = devices[:, unit_of] == devices[:, u : u + 1]
    return np.stack([visited, current, with_current, start], axis=-1).astype(np.float32)
