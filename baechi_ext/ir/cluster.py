"""Cluster: the devices, what they hold and how fast they are, and the links between them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from math import inf
from pathlib import Path
from types import MappingProxyType
from typing import Any

from baechi_ext.errors import ClusterError
from baechi_ext.ir.files import SCHEMA_VERSION
from baechi_ext.ir.made_by import Saved, load_as
from baechi_ext.ir.numbers import MOST_DEVICES, as_bytes, as_number


@dataclass(frozen=True, slots=True)
class Device:
    """A device runs ops, one at a time."""

    name: str
    memory_bytes: int | float | None = None
    """None: unlimited."""
    speed: float = 1.0
    """An op takes compute_us / speed."""

    def __post_init__(self) -> None:
        """Raises ClusterError for what is no name, no size or no speed."""
        if not isinstance(self.name, str):
            raise ClusterError(f"a device's name is {self.name!r}; expected a text")
        if self.memory_bytes is not None:
            as_bytes(self.memory_bytes, f"memory_bytes of device {self.name!r}", ClusterError)
        as_number(self.speed, f"speed of device {self.name!r}", ClusterError)


@dataclass(frozen=True, slots=True)
class Link:
    """Costs of moving a tensor. The first two take time on the link, the next four on the sending and receiving device."""

    us_per_byte: float = 0.0
    latency_us: float = 0.0
    send_us: float = 0.0
    send_us_per_byte: float = 0.0
    receive_us: float = 0.0
    receive_us_per_byte: float = 0.0
    issue_us: float = 0.0
    """Time that it takes the host, where one thread gives all devices their work, one piece after the other."""

    def __post_init__(self) -> None:
        """Raises ClusterError for a cost that is negative or no number."""
        for f in fields(self):
            as_number(getattr(self, f.name), f"{f.name} of a link", ClusterError)

    def transfer_us(self, size: float) -> float:
        return self.latency_us + size * self.us_per_byte

    def sending_us(self, size: float) -> float:
        return self.send_us + size * self.send_us_per_byte

    def receiving_us(self, size: float) -> float:
        return self.receive_us + size * self.receive_us_per_byte

    @property
    def total(self) -> tuple[float, float]:
        """The cost of a tensor to the link and the devices at its ends: microseconds, and microseconds a byte."""
        fixed_us = self.latency_us + self.send_us + self.receive_us
        return fixed_us, self.us_per_byte + self.send_us_per_byte + self.receive_us_per_byte

    def total_us(self, size: float) -> float:
        """All that a tensor costs the link and the devices at its ends."""
        return self.transfer_us(size) + self.sending_us(size) + self.receiving_us(size)

    def to_json(self) -> dict[str, float]:
        costs = {f.name: getattr(self, f.name) for f in fields(self)}
        return {k: v for k, v in costs.items() if v or k in ("us_per_byte", "latency_us")}

    @classmethod
    def from_json(cls, value: Any, what: str) -> "Link":
        if not isinstance(value, dict):
            raise ClusterError(f"{what} is {value!r}; expected an object")
        for key in ("us_per_byte", "latency_us"):
            if value.get(key) is None:
                raise ClusterError(f'{what} has no "{key}"')
        return cls(**{f.name: as_number(value.get(f.name, 0.0), f"{f.name} of {what}", ClusterError) for f in fields(cls)})


DEFAULT_LINK = Link(us_per_byte=0.0001754, latency_us=134.0)
"""Baechi's own defaults."""


@dataclass(frozen=True)
class Cluster(Saved):
    """Devices and directed links. `link(i, j)` is the link from device i to device j.

    Raises ClusterError where there is no device, a name appears twice, a speed is not positive, or a pair names an unknown device.
    """

    devices: tuple[Device, ...]
    default: Link = Link()
    pairs: Mapping[tuple[str, str], Link] = field(default_factory=dict)
    parallel_transfers: bool = False
    """False: each device has one outgoing and one incoming copy channel."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "pairs", MappingProxyType(dict(self.pairs)))
        if not self.devices:
            raise ClusterError("the cluster has no device; give it at least one")
        if len(self.devices) > MOST_DEVICES:
            raise ClusterError(f"the cluster has {len(self.devices)} devices; give it {MOST_DEVICES} at most")
        names = [d.name for d in self.devices]
        for i, device in enumerate(self.devices):
            if device.name in names[:i]:
                raise ClusterError(f"device name {device.name!r} appears twice; give every device its own name")
            if not device.speed > 0:
                raise ClusterError(f"device {device.name!r} has speed {device.speed!r}; expected a positive number")
        for pair in self.pairs:
            for end in pair:
                if end not in names:
                    raise ClusterError(f"link {pair[0]!r} -> {pair[1]!r}: {end!r} is not a device; the devices are {', '.join(names)}")

    def __len__(self) -> int:
        return len(self.devices)

    @property
    def fastest(self) -> int:
        """The position of the fastest device, of equals the first."""
        return max(range(len(self.devices)), key=lambda d: (self.devices[d].speed, -d))

    @property
    def rooms(self) -> list[float]:
        """The memory of each device in bytes; infinite where it is unlimited."""
        return [inf if d.memory_bytes is None else float(d.memory_bytes) for d in self.devices]

    def each_with(self, name: str, values: Iterable[Any]) -> "Cluster":
        """The cluster whose devices have these values of a field, one each."""
        return replace(self, devices=tuple(replace(d, **{name: value}) for d, value in zip(self.devices, values, strict=True)))

    def link(self, source: int, target: int) -> Link:
        return self.pairs.get((self.devices[source].name, self.devices[target].name), self.default)

    def mean_link(self) -> Link:
        """The average costs of links between two different devices; zeros where there is one device."""
        links = [self.link(i, j) for i in range(len(self)) for j in range(len(self)) if i != j]
        return Link(*(sum(getattr(x, f.name) for x in links) / max(1, len(links)) for f in fields(Link)))

    def link_table(self) -> tuple[tuple[Link, ...], ...]:
        """`table[i][j]` is the link from device i to device j: for loops that ask often."""
        return tuple(tuple(self.link(i, j) for j in range(len(self))) for i in range(len(self)))

    @classmethod
    def uniform(
        cls,
        num_devices: int,
        *,
        memory_bytes: int | float | None = None,
        link: Link = Link(),  # noqa: B008 - frozen
        parallel_transfers: bool = False,
        prefix: str = "device",
    ) -> "Cluster":
        """`num_devices` equal devices named prefix:0, prefix:1, ... with equal links."""
        if num_devices < 1:
            raise ClusterError(f"the number of devices is {num_devices}; expected at least 1")
        devices = tuple(Device(f"{prefix}:{i}", memory_bytes) for i in range(num_devices))
        return cls(devices, link, parallel_transfers=parallel_transfers)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA_VERSION,
            "devices": [{"name": d.name, "memory_bytes": d.memory_bytes, "speed": d.speed} for d in self.devices],
            "links": {
                "default": self.default.to_json(),
                "pairs": [{"source": s, "target": d, **link.to_json()} for (s, d), link in self.pairs.items()],
            },
            "parallel_transfers": self.parallel_transfers,
        }

    @classmethod
    def from_json(cls, value: Any) -> "Cluster":
        """Raises ClusterError."""
        if not isinstance(value, dict) or not isinstance(value.get("devices"), list):
            raise ClusterError('a cluster needs a list "devices"')
        links = value.get("links", {})
        if not isinstance(links, dict) or "default" not in links or not isinstance(links.get("pairs", []), list):
            raise ClusterError('a cluster needs "links" with a "default" link and, optionally, a list "pairs"')
        pairs = {}
        for i, pair in enumerate(links.get("pairs", [])):
            if not isinstance(pair, dict) or "source" not in pair or "target" not in pair:
                raise ClusterError(f"link pair {i} is {pair!r}; expected an object with source and target")
            ends = str(pair["source"]), str(pair["target"])
            if ends in pairs:
                raise ClusterError(f"link {ends[0]!r} -> {ends[1]!r} appears twice; keep one")
            pairs[ends] = Link.from_json(pair, f"link {ends[0]!r} -> {ends[1]!r}")
        parallel = value.get("parallel_transfers", False)
        if not isinstance(parallel, bool):
            raise ClusterError(f'"parallel_transfers" is {parallel!r}; expected true or false')
        devices = tuple(_device_from_json(d, i) for i, d in enumerate(value["devices"]))
        return cls(devices, Link.from_json(links["default"], "the default link"), pairs, parallel)

    @classmethod
    def load(cls, path: str | Path) -> "Cluster":
        """Raises FileError or ClusterError."""
        return load_as(path, "cluster", cls.from_json)


def _device_from_json(value: Any, position: int) -> Device:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ClusterError(f'device {position} is {value!r}; expected an object with a string "name"')
    name, memory = value["name"], value.get("memory_bytes")
    return Device(
        name=name,
        memory_bytes=None if memory is None else as_bytes(memory, f"memory_bytes of device {name!r}", ClusterError),
        speed=as_number(value.get("speed", 1.0), f"speed of device {name!r}", ClusterError),
    )
