"""Parity: the placed step must compute what the unplaced step computes: its results, and every variable after it."""

import contextlib
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from baechi_runtime.measure.parity_result import Parity
from baechi_runtime.tensorflow.servers.session import PlacedSession
from baechi_runtime.tensorflow.step import Captured
from baechi_runtime.tensorflow.verify import Verification, off_by_the_last_place, results_of


def check_parity(captured: Captured, session: PlacedSession) -> Parity:
    """One placed step beside one unplaced step from the same state: loss and every variable. Both begin anew afterwards.

    Raises ParityError where they differ by more than rounding explains.
    """
    step, variables = captured.step, {v.shared_name: v.variable for v in captured.function.variables}

    def unplaced(change: int | None = None) -> dict[str, np.ndarray]:
        given = {n: x if change is None else off_by_the_last_place(x, change) for n, x in captured.first.items()}
        for name, variable in variables.items():
            variable.assign(given[name])
        inputs = [x if change is None else off_by_the_last_place(x, change) for x in step.inputs]
        results = results_of(captured.unplaced(*map(tf.constant, inputs)))
        after = {n: v.numpy() for n, v in variables.items()}
        for name, variable in variables.items():
            variable.assign(captured.first[name])
        return results | after

    with _as_captured():
        expected = unplaced()
        session.initialise(captured.first)
        actual = results_of(session.run()) | session.variables()
        session.initialise(captured.first)
        return Verification().compare(expected, actual, unplaced)


@contextlib.contextmanager
def _as_captured() -> Iterator[None]:
    """Traced now, a tf.function keeps its graph as it is, as placed ones do: rewriting would round in another way."""
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": before.get("disable_meta_optimizer", False)})
