"""Parity: the placed step must compute what the unplaced step computes: its results, and every variable after it.

Some variables are decided by rounding alone: Adam moves the bias before a normalisation, whose gradient ought to be 0, by what is left of
that 0, divided by its own size. Where variables differ, the unplaced step therefore runs again from values that are off by one unit in
their last place; a difference of up to four times what this changes is no fault of the placed step. And where they differ from a step whose
graph TensorFlow has rewritten, or compiled, which rounds in another way, the one that counts is the step as it was captured.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from baechi_ext.capture.tensorflow_graph import CapturedFunction
from baechi_ext.errors import CaptureError
from baechi_runtime.measure.comparator import differences
from baechi_runtime.measure.parity_result import Parity, in_json, require_parity
from baechi_runtime.tensorflow.servers.session import PlacedSession
from baechi_runtime.tensorflow.step import Captured

TOLERANCE = 1e-5
PERTURBED_STEPS = 3
_MORE_THAN_ROUNDING = 4.0
"""Times what the perturbed steps changed."""
_CHANGES = (
    "the step may depend on something that is neither a tensor nor a variable, and changes from step to step. Take that out of it, or go "
    "on unplaced with fallback"
)

_SEEDS = ("seed", "seed2")
"""Attributes of the ops that draw from a state of their own; without a seed both are 0."""

Values = Mapping[str, np.ndarray]


def check_parity(captured: Captured, session: PlacedSession) -> Parity:
    """One placed step beside one unplaced step from the same state: loss and every variable. Both begin anew afterwards.

    Raises ParityError where they differ by more than rounding explains.
    """

    def unplaced(seed: int | None = None) -> dict[str, np.ndarray]:
        captured.function.assign({n: perturbed(x, seed) for n, x in captured.first.items()})
        results = results_of(captured.function.unplaced(*(tf.constant(perturbed(x, seed)) for x in captured.step.inputs)))
        return results | captured.function.values()

    with as_captured():
        try:
            expected = unplaced()
            session.initialise(captured.first)
            actual = results_of(session.run()) | session.variables()
            session.initialise(captured.first)
            return Verification().compare(expected, actual, unplaced)
        finally:
            captured.function.assign(captured.first)


@contextlib.contextmanager
def as_captured() -> Iterator[None]:
    """Called now, a tf.function runs its graph as it is, as placed ones do: rewriting would round in another way."""
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": before.get("disable_meta_optimizer", False)})


def draws_anew(captured: CapturedFunction) -> bool:
    """True if the step draws random numbers that no second run draws again, so that nothing can be compared."""
    return any(_SEEDS[0] in node.attr for node in _all_nodes(captured.graph_def))


def require_no_sequence(step: str, graph_def: Any) -> None:
    """Raises CaptureError where a step draws the next numbers of a seeded sequence, whose state its function alone has."""
    for node in _all_nodes(graph_def):
        if any(node.attr[a].i for a in _SEEDS if a in node.attr):
            raise CaptureError(
                f"{step} draws the next numbers of a seeded sequence ({node.op}), with which only the function itself can go on; draw from "
                "a tf.random.Generator, or by keras.random with a SeedGenerator"
            )


def _all_nodes(graph_def: Any) -> Iterator[Any]:
    """The nodes, and those of branches and bodies of loops."""
    yield from graph_def.node
    for function in graph_def.library.function:
        yield from function.node_def


@dataclass
class Verification:
    """The comparisons made so far."""

    steps: int = 0
    compared: int = 0
    max_rel_diff: float = 0.0
    """Largest relative difference of what is decided by more than rounding."""
    rounding: set[str] = field(default_factory=set)
    """Names of what is decided by rounding."""

    def to_json(self) -> dict[str, Any]:
        found = {"steps": self.steps, "compared": self.compared, "max_rel_diff": in_json(self.max_rel_diff)}
        return {**found, "decided_by_rounding": len(self.rounding)}

    def compare(self, expected: Values, actual: Values, again: Callable[[int | None], Values]) -> Parity:
        """The parity of what is decided by more than rounding.

        `again(seed)`: what the unplaced step, `as_captured`, makes of values that are `perturbed` so. Raises ParityError, naming the
        results and variables that differ by more than the tolerance and by more than rounding does.
        """
        found = differences(expected, actual)
        if any(d.relative > TOLERANCE for d in found.values()):
            expected = again(None)
            found = differences(expected, actual)
        wrong = {name: d.relative for name, d in found.items() if d.relative > TOLERANCE}
        repeated = differences(expected, again(None)) if wrong else {}  # a step that differs by itself explains nothing
        same = {name: expected[name] for name in wrong if name in expected and repeated[name].relative <= TOLERANCE}
        for seed in range(PERTURBED_STEPS if same else 0):
            other = again(seed)
            noise = differences(same, {name: other[name] for name in same})
            self.rounding.update(name for name, d in noise.items() if wrong[name] <= _MORE_THAN_ROUNDING * d.relative < np.inf)
        parity = Parity.of({name: d for name, d in found.items() if name not in self.rounding}, len(expected), TOLERANCE)
        self.max_rel_diff = max(self.max_rel_diff, parity.max_rel_diff)
        self.compared += len(expected)
        self.steps += 1
        require_parity(parity, advice=_CHANGES)
        return parity


def results_of(returned: Any) -> dict[str, np.ndarray]:
    """A step's results, flat and by number; Python's numbers as the tensors that a graph makes of them."""
    leaves = (tf.convert_to_tensor(x) if isinstance(x, tf.Variable) else x for x in tf.nest.flatten(returned))
    parts = [part for x in leaves for part in tf.nest.flatten(x, expand_composites=True)]
    values = [tf.convert_to_tensor(x) if isinstance(x, (bool, int, float)) else x for x in parts if x is not None]
    return {f"result {i}": np.asarray(x) for i, x in enumerate(values)}


def perturbed(value: np.ndarray, seed: int | None) -> np.ndarray:
    """Real numbers, each moved up or down to its neighbour, at random; without a seed, and of other kinds, as they are."""
    if seed is None or value.dtype.kind != "f":
        return value
    up = np.random.default_rng(seed).random(value.shape) < 0.5
    return np.nextafter(value, np.where(up, np.inf, -np.inf).astype(value.dtype))
