"""What the kernels of the exhaustive search work on, as records: the instance, and where the search stands."""

import numpy as np

Record = np.void
Array = np.ndarray

OPS, DEVICES, TENSORS, EDGES, EXCHANGES = 48, 8, 96, 768, 120
"""The largest instance that can be searched. Records of fixed shape compile many times as fast as tuples of arrays."""
_COPIES, _LEVELS = TENSORS * DEVICES, OPS + 2

INSTANCE = np.dtype(
    [
        ("ops", np.int64),
        ("devices", np.int64),
        ("tensors", np.int64),
        ("units", np.int64),
        ("exchanges", np.int64),
        ("parallel", np.bool_),
        ("limited", np.bool_),
        ("charges", np.bool_),
        # `things[things_from[i] : things_from[i + 1]]` are the things of i.
        ("order", np.int64, OPS),
        ("inputs", np.int64, EDGES),
        ("inputs_from", np.int64, OPS + 1),
        ("outputs", np.int64, TENSORS),
        ("outputs_from", np.int64, OPS + 1),
        ("readers", np.int64, EDGES),
        ("readers_from", np.int64, TENSORS + 1),
        ("producer", np.int64, TENSORS),
        ("name_rank", np.int64, TENSORS),
        # Ops of units, in the order in which units are placed.
        ("members", np.int64, OPS),
        ("members_from", np.int64, OPS + 1),
        # By unit: the device that it has to be on, or -1.
        ("pin", np.int64, OPS),
        ("duration_us", np.float64, (OPS, DEVICES)),
        ("least_us", np.float64, OPS),
        # Each op's time at the speed of all devices together.
        ("load_us", np.float64, OPS),
        ("tail_us", np.float64, OPS),
        # By source, target and tensor.
        ("transfer_us", np.float64, (DEVICES, DEVICES, TENSORS)),
        ("send_us", np.float64, (DEVICES, DEVICES, TENSORS)),
        ("receive_us", np.float64, (DEVICES, DEVICES, TENSORS)),
        ("tensor_bytes", np.float64, TENSORS),
        ("persistent_bytes", np.float64, OPS),
        ("working_bytes", np.float64, OPS),
        ("live_bytes", np.float64, OPS),
        ("memory_bytes", np.float64, DEVICES),
        # For each device, the first that can be exchanged with it; and all exchanges, the first of which changes nothing.
        ("twin", np.int64, DEVICES),
        ("labels", np.int64, (EXCHANGES, DEVICES)),
    ]
)
"""A graph on a cluster."""

SEARCH = np.dtype(
    [
        ("cursor", np.int64, 4),
        ("best_us", np.float64),
        # -1: not placed yet. The actual placement has its devices exchanged.
        ("placement", np.int64, OPS),
        ("actual", np.int64, OPS),
        ("choice", np.int64, OPS),
        # Of the schedule, by level: one more for each choice among ready ops.
        ("now", np.float64, _LEVELS),
        ("device", np.int64, _LEVELS),
        ("start", np.float64, (_LEVELS, OPS)),
        ("end", np.float64, (_LEVELS, OPS)),
        ("missing", np.int64, (_LEVELS, OPS)),
        ("sequence", np.int64, (_LEVELS, OPS)),
        ("started", np.int64, _LEVELS),
        ("running", np.int64, (_LEVELS, DEVICES)),
        ("sending", np.int64, (_LEVELS, DEVICES)),
        ("receiving", np.int64, (_LEVELS, DEVICES)),
        ("copy_state", np.int64, (_LEVELS, _COPIES)),
        ("copy_from", np.float64, (_LEVELS, _COPIES)),
        ("copy_until", np.float64, (_LEVELS, _COPIES)),
        ("taken", np.int64, (_LEVELS, _COPIES)),
        ("candidate", np.int64, (_LEVELS, OPS)),
        ("candidates", np.int64, _LEVELS),
        ("tried", np.int64, _LEVELS),
        # Scratch.
        ("head", np.float64, OPS),
        ("length", np.float64, OPS),
        ("tail", np.float64, OPS),
        ("jobs", np.float64, (3, _COPIES)),
        ("urgency", np.float64, DEVICES),
    ]
)
"""Where the search stands."""

DEPTH, LEVEL, RELABELING, NODES = range(4)
"""Indices of the cursor. LEVEL is -1 while units are placed."""
DONE, PAUSED, FOUND = range(3)
"""What `search` returns."""
ABSENT, WAITING, FLYING, PRESENT = range(4)
TOLERANCE = 1e-9
SLACK = 1e-12
"""Sums of sizes that are not whole may be off by so much, relative to a limit; what is found is judged again outside."""
