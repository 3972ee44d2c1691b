"""The environment of worker processes: the variables by which they know their place, and the network that they talk over. The variables are
torchrun's, whoever started the workers; and ours, of what the launcher shares with workers of its own."""

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Iterator, Mapping, MutableMapping

from baechi_ext.errors import ExecutionError
from baechi_runtime.host.listeners import towards
from baechi_runtime.host.variables import number_of

CRASH_LOG = "BAECHI_OP_BOARD"
"""The address of the launcher's crash log."""
STORE_SOCKET = "BAECHI_STORE_SOCKET"
"""The descriptor of the listening socket that rank 0 is to have its store at."""
INTERFACE = "GLOO_SOCKET_IFNAME"
_OF_NCCL = "NCCL_SOCKET_IFNAME"
_OTHERS = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID")
"""Variables by which libraries take a process for one of several."""
_LOOPBACK, _LOOPBACKS = "127.0.0.1", "127."
_ELSEWHERE = "192.0.2.1"
"""An address that is nobody's (RFC 5737): the way there is the way out."""
_SIOCGIFADDR = 0x8915
_NAME_BYTES, _REQUEST_BYTES, _ADDRESS_AT = 15, 256, 20


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


@contextlib.contextmanager
def as_if_alone(environment: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """While it is entered, the variables say of no other workers; RANK stays, for a script that writes its files once."""
    hidden = {name: environment.pop(name) for name in _OTHERS if name in environment}
    try:
        yield
    finally:
        environment.update(hidden)


def choose_interface(environment: MutableMapping[str, str] = os.environ) -> None:
    """Tells gloo and NCCL to use the interface that leads to MASTER_ADDR, or the loopback one where all workers are on this machine, unless
    the user has chosen one (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME).

    Left to itself gloo takes the address that the machine's own name stands for, which often is one that no other machine can reach, or one
    that all others can. Where none is found nothing is changed. A name that means the loopback interface here, as a machine's own does on
    Debian, means another one to the other machines: then it is the one that leads out. Raises ExecutionError where none does.
    """
    if _is_one_machine(environment) and not _is_met_elsewhere(environment):
        environment["MASTER_ADDR"] = _LOOPBACK
    address = _LOOPBACK if _is_one_machine(environment) else towards(environment.get("MASTER_ADDR", ""), _port(environment))
    if address is not None and address.startswith(_LOOPBACKS) and _is_of_several(environment) and INTERFACE not in environment:
        address = towards(_ELSEWHERE)
        if address is None:
            raise ExecutionError(
                f"MASTER_ADDR={environment['MASTER_ADDR']} is an address of this machine alone, and there are others; give one that all of "
                f"them can reach, or name the interface that leads to them by {INTERFACE}"
            )
    name = None if address is None else _interface_of(address)
    if name is not None:
        for variable in (INTERFACE, _OF_NCCL):
            environment.setdefault(variable, name)


def listen_at(address: str, port: int = 0) -> int:
    """The descriptor of a socket that listens there alone; torch's store listens on all interfaces otherwise. Raises OSError."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen()
        return listener.detach()


def meeting_place(environment: Mapping[str, str] = os.environ) -> int | None:
    """Where rank 0 is to have the store that the workers meet at: the descriptor of a socket that listens at MASTER_ADDR alone. None where
    somebody else has it, or the name is of another interface for the other machines, or the address can't be listened at. A socket that the
    launcher gave is taken."""
    if STORE_SOCKET in environment:
        return int(environment[STORE_SOCKET])
    if environment.get("RANK") != "0" or _is_met_elsewhere(environment):
        return None
    given = environment.get("MASTER_ADDR", "")
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(given)
        if not address.startswith("127.") or given in (address, "localhost"):
            return listen_at(address, _port(environment))
    return None


def _is_one_machine(environment: Mapping[str, str]) -> bool:
    return "WORLD_SIZE" in environment and environment.get("LOCAL_WORLD_SIZE") == environment["WORLD_SIZE"]


def _is_of_several(environment: Mapping[str, str]) -> bool:
    """True if there are other machines, and what the address is called is not said to be of this one alone."""
    given = environment.get("MASTER_ADDR", "")
    local = environment.get("LOCAL_WORLD_SIZE", environment.get("WORLD_SIZE"))
    return local != environment.get("WORLD_SIZE") and given != "localhost" and not given.startswith(_LOOPBACKS)


def _is_met_elsewhere(environment: Mapping[str, str]) -> bool:
    """True if whoever started the workers has the store."""
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _port(environment: Mapping[str, str]) -> int:
    return number_of("MASTER_PORT", 0, environment, least=0)


def _interface_of(address: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ask:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                request = struct.pack(f"{_REQUEST_BYTES}s", name.encode()[:_NAME_BYTES])
                found = fcntl.ioctl(ask.fileno(), _SIOCGIFADDR, request)[_ADDRESS_AT : _ADDRESS_AT + 4]
                if socket.inet_ntoa(found) == address:
                    return name
    return None
