"""The differences that a placed step of TensorFlow may show from the unplaced one: rounding, and what rounding alone decides."""

import json
import math

import numpy as np
import pytest
import tensorflow as tf

from baechi_ext.errors import ParityError
from baechi_runtime.tensorflow.parity import TOLERANCE, Verification, results_of

ONE = np.ones(3, np.float32)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_on_one_side_is_refused(odd: float) -> None:
    value = np.array([1, odd, 2], np.float32)
    Verification().compare({"weight": value}, {"weight": value.copy()}, lambda seed: {"weight": ONE})
    for expected, actual in ((value, ONE), (ONE, value), (value, -value if math.isinf(odd) else np.roll(value, 1))):
        verification = Verification()
        with pytest.raises(ParityError, match=r"\(allowed 1e-05\): weight \(not finite on one side\); .*go on unplaced with fallback"):
            verification.compare({"weight": expected}, {"weight": actual}, lambda seed, kept=expected: {"weight": kept})
        assert json.loads(json.dumps(verification.to_json(), allow_nan=False))["max_rel_diff"] is None
        assert not verification.rounding


def test_a_small_value_is_compared_with_itself() -> None:
    small = ONE * 1e-4
    with pytest.raises(ParityError, match=r"weight \(0.01 relative\)"):
        Verification().compare({"weight": small}, {"weight": small * np.float32(1.01)}, lambda seed: {"weight": small})


def test_what_rounding_decides_may_differ() -> None:
    def perturbed(seed: int | None) -> dict[str, np.ndarray]:
        return {"bias": ONE if seed is None else -ONE, "weight": ONE}

    verification = Verification()
    parity = verification.compare({"bias": ONE, "weight": ONE}, {"bias": -ONE, "weight": ONE * np.float32(1 + TOLERANCE / 4)}, perturbed)
    assert (parity.passed, parity.worst, parity.compared) == (True, "weight", 2)
    assert 0 < parity.max_rel_diff == verification.max_rel_diff <= TOLERANCE
    assert verification.rounding == {"bias"}
    for odd in (math.nan, 10.0):
        with pytest.raises(ParityError, match="bias"):
            Verification().compare({"bias": ONE}, {"bias": ONE * np.float32(odd)}, perturbed)


def test_results_of_another_dtype_shape_or_number_are_refused() -> None:
    expected = results_of([tf.constant([1.0, 2.0], tf.bfloat16), 3])
    assert expected.keys() == {"result 0", "result 1"}
    for actual in (
        {**expected, "result 0": np.float32([1, 2])},
        {**expected, "result 1": np.int32([3])},
        {**expected, "result 1": np.int32(4)},
        {"result 0": expected["result 0"]},
        {**expected, "result 2": ONE},
    ):
        with pytest.raises(ParityError):
            Verification().compare(expected, actual, lambda seed: expected)
    near = tf.constant([1.0, 2.015625], tf.bfloat16).numpy()
    with pytest.raises(ParityError, match=r"result 0 \(0.0078 relative\)"):
        Verification().compare(expected, {**expected, "result 0": near}, lambda seed: expected)
