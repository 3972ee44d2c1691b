"""The network that worker processes talk over."""

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import MutableMapping

VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915
_NAME_BYTES, _REQUEST_BYTES, _ADDRESS_AT = 15, 256, 20


def choose_interface(environment: MutableMapping[str, str] = os.environ) -> None:
    """Tells gloo to use the interface that leads to MASTER_ADDR, unless the user has chosen one (GLOO_SOCKET_IFNAME).

    Left to itself gloo takes the address that the machine's own name stands for, which often is one that no other machine can reach.
    Where there is one machine only, or none is found, nothing is changed.
    """
    if VARIABLE in environment:
        return
    address = _towards(environment.get("MASTER_ADDR", ""), int(environment.get("MASTER_PORT", "0") or 0))
    if address is not None and not ipaddress.ip_address(address).is_loopback:
        name = _interface_of(address)
        if name is not None:
            environment[VARIABLE] = name


def _towards(host: str, port: int) -> str | None:
    """This machine's own address for talking to a host; nothing is sent."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port or 1))
        return str(probe.getsockname()[0])
    return None


def _interface_of(address: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ask:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                request = struct.pack(f"{_REQUEST_BYTES}s", name.encode()[:_NAME_BYTES])
                found = fcntl.ioctl(ask.fileno(), _SIOCGIFADDR, request)[_ADDRESS_AT : _ADDRESS_AT + 4]
                if socket.inet_ntoa(found) == address:
                    return name
    return None
