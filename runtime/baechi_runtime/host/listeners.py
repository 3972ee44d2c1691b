"""Sockets that take connections from this machine alone, or only at the addresses by which named hosts know it.

What a framework opens by itself listens on all interfaces. Such a socket is given a filter, which the kernel asks for every packet (classic
BPF; no right is needed): what was sent to another address never arrives, nor does it on the connections that the socket takes.
"""

import contextlib
import ctypes
import ipaddress
import os
import socket
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
LOOPBACK: tuple[Network, ...] = (ipaddress.IPv4Network("127.0.0.0/8"), ipaddress.IPv6Network("::1/128"))
_SO_ATTACH_FILTER, _SO_BINDTODEVICE = 26, 25
_LOAD_WORD, _LOAD_BYTE, _SHIFT_RIGHT, _AND, _IF_EQUAL, _RETURN = 0x20, 0x30, 0x74, 0x54, 0x15, 0x06
_IP_HEADER = 0x100000000 - 0x100000
"""The offset at which a filter finds it; see bpf(4) and linux/filter.h."""
_TARGET_AT = {4: 16, 6: 24}
"""Where an IP header of that version has the address that a packet was sent to."""
_EVERYTHING, _NOTHING, _LISTENS = 0xFFFFFFFF, 0, 10


def towards(host: str, port: int = 1) -> str | None:
    """This machine's own address for talking to a host, IPv4; nothing is sent. None where there is no way there."""
    if not host:
        return None
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port or 1))
        return str(probe.getsockname()[0])
    return None


def own_networks(host: str, others: Iterable[str]) -> tuple[Network, ...]:
    """The addresses at which the `others` find this machine, which is called `host`: those of the name, as far as they are this machine's,
    and those that it talks to the others from. Empty where none is found."""
    found: dict[Network, None] = {}
    for address in filter(None, [*_addresses_here(host), *(towards(other) for other in others)]):
        own = ipaddress.ip_address(address.partition("%")[0])
        found |= dict.fromkeys(LOOPBACK if own.is_loopback else (ipaddress.ip_network(own),))
    return tuple(found)


def _addresses_here(host: str) -> Iterator[str]:
    with contextlib.suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind(address)  # fails where the address is another machine's
                yield str(address[0])


def keep_listeners_to(networks: Sequence[Network]) -> str:
    """From here on this process's listening sockets take only what was sent to these addresses. Returns who came in before at another
    one, and has to be refused; empty where nobody did. Raises OSError where the system has no such filters: only Linux has."""
    ports = set()
    for listener in _listeners():
        with listener:
            _attach(listener, _program(networks))
            if tuple(networks) == LOOPBACK:
                with contextlib.suppress(OSError):  # refuses what is dropped otherwise; not before Linux 5.7
                    listener.setsockopt(socket.SOL_SOCKET, _SO_BINDTODEVICE, b"lo\0")
            ports.add(listener.getsockname()[1])
    allowed = (peer for own, port, peer in _connections() if port in ports and not any(own in network for network in networks))
    return next(allowed, "")


def _listeners() -> Iterator[socket.socket]:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found = socket.socket(fileno=os.dup(int(name)))
                listens = found.family in (socket.AF_INET, socket.AF_INET6) and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if listens:
                    yield found
                else:
                    found.close()


def _attach(listener: socket.socket, program: bytes) -> None:
    held = ctypes.create_string_buffer(program, len(program))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", len(program) // 8, ctypes.addressof(held)))


def _program(networks: Sequence[Network]) -> bytes:
    """A filter that lets in what was sent to one of the networks."""
    code: list[tuple[int, int, int, int]] = []
    for network in networks:
        masks, values = (memoryview(a.packed) for a in (network.netmask, network.network_address))
        block: list[tuple[int, int]] = [(_LOAD_BYTE, _IP_HEADER), (_SHIFT_RIGHT, 4), (_IF_EQUAL, network.version)]
        for at in range(0, len(masks), 4):
            mask, value = (int.from_bytes(part[at : at + 4], "big") for part in (masks, values))
            block += [(_LOAD_WORD, _IP_HEADER + _TARGET_AT[network.version] + at), (_AND, mask), (_IF_EQUAL, value)]
        code += [(do, 0, len(block) - i if do == _IF_EQUAL else 0, operand) for i, (do, operand) in enumerate(block)]
        code.append((_RETURN, 0, 0, _EVERYTHING))
    code.append((_RETURN, 0, 0, _NOTHING))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def _connections() -> Iterator[tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int, str]]:
    """The own address and port, and the peer's address, of each TCP connection that is not just listened for."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/self/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
                _, own, peer, state, *_ = line.split()
                if int(state, 16) != _LISTENS:
                    yield _address(own), int(own.rpartition(":")[2], 16), str(_address(peer))


def _address(said: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An address as Linux writes it: words of four bytes, in the processor's order."""
    raw = bytes.fromhex(said.partition(":")[0])
    words = struct.unpack(f">{len(raw) // 4}I", raw)
    found = ipaddress.ip_address(struct.pack(f"={len(words)}I", *words))
    return getattr(found, "ipv4_mapped", None) or found
