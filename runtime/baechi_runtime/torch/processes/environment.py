"""The environment variables by which worker processes know their place. They are torchrun's, whoever started the workers; and ours, of what
the launcher shares with workers of its own."""

import os
from collections.abc import Mapping

from baechi_ext.errors import ExecutionError

CRASH_LOG = "BAECHI_OP_BOARD"
"""The address of the launcher's crash log."""
STORE_SOCKET = "BAECHI_STORE_SOCKET"
"""The descriptor of the listening socket that rank 0 is to have its store at."""


def is_worker(environment: Mapping[str, str] = os.environ) -> bool:
    """True if this process was started as one of a group."""
    return "RANK" in environment and "WORLD_SIZE" in environment


def worker_place(environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """(rank, number of workers). Raises ExecutionError where this process is not a worker."""
    try:
        return int(environment["RANK"]), int(environment["WORLD_SIZE"])
    except (KeyError, ValueError) as e:
        raise ExecutionError(f"this process is not a worker ({e} is not set); start it with torchrun or --workers=process") from e


def of_worker(rank: int, count: int, port: int) -> dict[str, str]:
    """The variables of one of this many workers of this machine, which meet at a port of it."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    return {**{name: str(place) for name, place in places.items()}, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
