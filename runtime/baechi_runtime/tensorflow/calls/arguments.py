"""The arguments of a call of the user's training step, taken apart."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from baechi_ext.errors import CaptureError


@dataclass(frozen=True)
class Arguments:
    """Arrays, and what stands around them."""

    inputs: tuple[np.ndarray, ...]
    key: tuple[Any, ...]
    """Equal for calls that one graph computes."""
    fill: Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]]
    """Positional and keyword arguments with other values in place of the arrays."""

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Arguments":
        """Raises CaptureError for what is no dense tensor."""
        leaves = tf.nest.flatten((args, kwargs))
        for leaf in leaves:
            if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor, tf.IndexedSlices)):
                advice = "pass dense ones (ragged.to_tensor(), tf.sparse.to_dense)"
                raise CaptureError(f"an argument of the training step is a {type(leaf).__name__}, which can't be placed; {advice}")
        where = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, (tf.Tensor, np.ndarray, np.generic)))
        inputs = tuple(np.asarray(leaves[i]) for i in where)
        fixed = tuple(_fixed(leaf) for i, leaf in enumerate(leaves) if i not in where)
        structure = str(tf.nest.map_structure(lambda _: 0, (args, kwargs)))

        def fill(values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            filled = list(leaves)
            for i, value in zip(where, values, strict=True):
                filled[i] = value
            return tf.nest.pack_sequence_as((args, kwargs), filled)

        return cls(inputs, (structure, where, fixed, tuple((i.shape, i.dtype.str) for i in inputs)), fill)


def _fixed(value: Any) -> Any:
    """The key of an argument that is no array: numbers and text by type and value, other objects by identity."""
    return (type(value), value) if isinstance(value, (int, float, str, type(None))) else id(value)
