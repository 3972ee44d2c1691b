"""Configuration spaces: all ways to split a node's loops over at most so many devices.

Every divisor of an axis is a split, powers of two or not, and every product of splits up to the number of devices is a configuration
(Elango, IPDPS 2021, section II; the devices left over hold copies, or nothing).
"""

from math import isqrt

import numpy as np
from numpy.typing import NDArray

from baechi_ext.shard.graph import Axis, Node

Configurations = NDArray[np.int64]
"""A row a configuration, a column an axis: into how many parts it is split."""


def divisors(n: int, limit: int) -> list[int]:
    """The divisors of `n` that are at most `limit`, ascending."""
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return [d for d in sorted({*small, *(n // d for d in small)}) if d <= limit]


def splits(axis: Axis, limit: int) -> list[int]:
    """Into how many parts an axis can be split, each at least its `smallest` long."""
    if not axis.splits:
        return [1]
    return [d for d in divisors(axis.size, limit) if axis.size / d >= axis.smallest] or [1]


def configurations(node: Node, devices: int) -> Configurations:
    """All configurations of a node on at most so many devices, in lexical order; never none."""
    rows = np.ones((1, 0), np.int64)
    used = np.ones(1, np.int64)
    for axis in node.axes:
        choices = np.array(splits(axis, devices), np.int64)
        product = used[:, None] * choices
        row, choice = np.nonzero(product <= devices)
        rows = np.column_stack((rows[row], choices[choice]))
        used = product[row, choice]
    return rows[_contiguous(rows, node.sizes)] if node.contiguous else rows


def _contiguous(rows: Configurations, sizes: tuple[int, ...]) -> NDArray[np.bool_]:
    """The rows that split memory into whole pieces: axes split to the last, then one partly split, then axes not split."""
    whole = rows == np.array(sizes)
    free = np.ones(len(rows), bool)
    valid = np.ones(len(rows), bool)
    for axis in range(rows.shape[1]):
        valid &= free | (rows[:, axis] == 1)
        free &= whole[:, axis]
    return valid
