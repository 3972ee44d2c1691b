"""Stands in for gymnasium: one environment, a pole on a cart (Barto, Sutton and Anderson 1983, the equations of motion of section V)."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np

STEPS = 500
FORCE, GRAVITY, CART, POLE, HALF_LENGTH, SECONDS = 10.0, 9.8, 1.0, 0.1, 0.5, 0.02


class CartPole:
    """Ends where the pole leans by more than 12 degrees, the cart is 2.4 from the middle, or after 500 steps."""

    def __init__(self) -> None:
        self.spec = SimpleNamespace(reward_threshold=475.0)
        self._generator = np.random.default_rng(0)
        self._state, self._steps = np.zeros(4), 0

    def reset(self, seed: int | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        """The state at the beginning."""
        if seed is not None:
            self._generator = np.random.default_rng(seed)
        self._state, self._steps = self._generator.uniform(-0.05, 0.05, 4), 0
        return self._state.astype(np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """State, reward, whether it ended, whether it was too long."""
        position, speed, angle, turning = self._state
        mass = CART + POLE
        push = ((FORCE if action else -FORCE) + POLE * HALF_LENGTH * turning**2 * math.sin(angle)) / mass
        gain = HALF_LENGTH * (4 / 3 - POLE * math.cos(angle) ** 2 / mass)
        turn = (GRAVITY * math.sin(angle) - math.cos(angle) * push) / gain
        shift = push - POLE * HALF_LENGTH * turn * math.cos(angle) / mass
        self._state = self._state + SECONDS * np.array([speed, shift, turning, turn])
        self._steps += 1
        ended = abs(self._state[0]) > 2.4 or abs(self._state[2]) > math.radians(12)
        return self._state.astype(np.float32), 1.0, bool(ended), self._steps >= STEPS, {}


def make(name: str, **_: Any) -> CartPole:
    """The pole on its cart, whatever is asked for."""
    return CartPole()
