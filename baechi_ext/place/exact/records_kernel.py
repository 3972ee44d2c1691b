"""Records that the kernels of the exhaustive search work on: the instance, and where the search stands."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Record = Any
"""One element of an Array, with the fields of its dtype."""
Array = NDArray[np.void]

OPS, DEVICES, TENSORS, EDGES, EXCHANGES = 48, 8, 96, 768, 120
"""The largest instance that can be searched. Records of fixed shape compile many times as fast as tuples of arrays."""
_COPIES, _LEVELS = TENSORS * DEVICES, OPS + 2

def _record(*fields: tuple[str, type, int | tuple[int, ...]]) -> np.dtype:
    """Fields by name: several names for those of one type and shape."""
    return np.dtype([(name, kind, shape) for names, kind, shape in fields for name in names.split()])


INSTANCE = _record(
    ("ops devices tensors units exchanges", np.int64, ()),
    # `things[things_from[i] : things_from[i + 1]]` are the things of i.
    ("order", np.int64, OPS),
    ("inputs readers", np.int64, EDGES),
    ("inputs_from outputs_from", np.int64, OPS + 1),
    ("readers_from", np.int64, TENSORS + 1),
    ("outputs producer name_rank", np.int64, TENSORS),
    # Ops of units, in the order in which units are placed; by unit: the device that it has to be on, or -1.
    ("members pin", np.int64, OPS),
    ("members_from", np.int64, OPS + 1),
    ("duration_us", np.float64, (OPS, DEVICES)),
    # `load_us`: each op's time at the speed of all devices together.
    ("least_us load_us tail_us persistent_bytes working_bytes live_bytes", np.float64, OPS),
    # By source, target and tensor.
    ("transfer_us send_us receive_us", np.float64, (DEVICES, DEVICES, TENSORS)),
    ("tensor_bytes home_bytes", np.float64, TENSORS),
    ("memory_bytes", np.float64, DEVICES),
    # For each device, the first that can be exchanged with it; and all exchanges, the first of which changes nothing.
    ("twin", np.int64, DEVICES),
    ("labels", np.int64, (EXCHANGES, DEVICES)),
    ("parallel limited charges", np.bool_, ()),
)
"""A graph on a cluster."""

SEARCH = _record(
    ("cursor", np.int64, 4),
    ("best_us", np.float64, ()),
    # -1: not placed yet. The actual placement has its devices exchanged.
    ("placement actual choice", np.int64, OPS),
    # Of the schedule, by level: one more for each choice among ready ops.
    ("now", np.float64, _LEVELS),
    ("device started candidates tried", np.int64, _LEVELS),
    ("start end", np.float64, (_LEVELS, OPS)),
    ("missing sequence candidate", np.int64, (_LEVELS, OPS)),
    ("running sending receiving", np.int64, (_LEVELS, DEVICES)),
    ("copy_state taken", np.int64, (_LEVELS, _COPIES)),
    ("copy_from copy_until", np.float64, (_LEVELS, _COPIES)),
    # Scratch.
    ("head length tail", np.float64, OPS),
    ("jobs", np.float64, (3, _COPIES)),
)
"""Where the search stands."""

DEPTH, LEVEL, RELABELING, NODES = range(4)
"""Indices of the cursor. LEVEL is -1 while units are placed."""
DONE, PAUSED, FOUND = range(3)
"""The results of `search`."""
ABSENT, WAITING, FLYING, PRESENT = range(4)
TOLERANCE = 1e-9
SLACK = 1e-12
"""Sums of sizes that are not whole may be off by so much, relative to a limit; what is found is judged again outside."""
