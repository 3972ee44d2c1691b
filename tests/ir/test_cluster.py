"""Cluster: devices and links, their file, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baechi_ext.errors import ClusterError
from baechi_ext.ir import Cluster, Device, Link

LINK = {"us_per_byte": 0.5, "latency_us": 10}


def a_file() -> dict[str, Any]:
    return {
        "devices": [{"name": "a", "memory_bytes": 100, "speed": 2.0}, {"name": "b"}],
        "links": {"default": dict(LINK), "pairs": [{"source": "a", "target": "b", "us_per_byte": 0, "latency_us": 3}]},
    }


def with_devices(*devices: Any) -> dict[str, Any]:
    return {**a_file(), "devices": list(devices)}


def with_links(**links: Any) -> dict[str, Any]:
    value = a_file()
    return {**value, "links": {**value["links"], **links}}


REFUSED = [
    (None, 'a cluster needs a list "devices"'),
    ({"links": {"default": LINK}}, 'a cluster needs a list "devices"'),
    ({"devices": []}, 'a cluster needs "links" with a "default" link'),
    ({**a_file(), "links": []}, 'a cluster needs "links"'),
    (with_links(pairs={}), 'a cluster needs "links" .* a list "pairs"'),
    (with_links(default=3), "the default link is 3; expected an object"),
    (with_links(default={"latency_us": 1}), 'the default link has no "us_per_byte"'),
    (with_links(default={"us_per_byte": 1}), 'the default link has no "latency_us"'),
    (with_links(default={**LINK, "send_us": -1}), "send_us of the default link is -1; expected at least 0"),
    (with_links(default={**LINK, "latency_us": "x"}), "latency_us of the default link is 'x'; expected a number"),
    (with_links(pairs=[3]), "link pair 0 is 3; expected an object with source and target"),
    (with_links(pairs=[{"source": "a", **LINK}]), "link pair 0 is .*; expected an object with source and target"),
    (with_links(pairs=[{"source": "a", "target": "c", **LINK}]), "link 'a' -> 'c': 'c' is not a device; the devices are a, b"),
    (with_links(pairs=[{"source": "a", "target": "b", **LINK}] * 2), "link 'a' -> 'b' appears twice; keep one"),
    (with_links(pairs=[{"source": "a", "target": "b"}]), "link 'a' -> 'b' has no \"us_per_byte\""),
    (with_devices(), "the cluster has no device; give it at least one"),
    (with_devices(5), "device 0 is 5; expected an object with a string \"name\""),
    (with_devices({"name": 5}), "device 0 is .*; expected an object with a string \"name\""),
    (with_devices({"name": "a"}, {"name": "a"}), "device name 'a' appears twice"),
    (with_devices(*({"name": str(d)} for d in range(1025))), "the cluster has 1025 devices; give it 1024 at most"),
    (with_devices({"name": "a", "speed": 0}), "device 'a' has speed 0.0; expected a positive number"),
    (with_devices({"name": "a", "speed": "fast"}), "speed of device 'a' is 'fast'; expected a number"),
    (with_devices({"name": "a", "memory_bytes": -1}), "memory_bytes of device 'a' is -1; expected at least 0"),
    ({**a_file(), "parallel_transfers": 1}, '"parallel_transfers" is 1; expected true or false'),
]


@pytest.mark.parametrize(("value", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_a_broken_rule_is_named(value: Any, message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        Cluster.from_json(value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Device(0), "a device's name is 0"),  # type: ignore[arg-type]
        (lambda: Device("a", -1), "memory_bytes of device 'a' is -1; expected at least 0"),
        (lambda: Device("a", speed=float("nan")), "speed of device 'a' is nan"),
        (lambda: Link(us_per_byte=-1.0), "us_per_byte of a link is -1.0; expected at least 0"),
    ],
)
def test_what_is_none_is_refused_where_it_is_made(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        make()


def test_from_json() -> None:
    cluster = Cluster.from_json(a_file())
    assert cluster.devices == (Device("a", 100, 2.0), Device("b", None, 1.0))
    assert cluster.link(1, 0) == Link(us_per_byte=0.5, latency_us=10)
    assert cluster.link(0, 1) == Link(us_per_byte=0, latency_us=3)
    assert cluster.link_table()[0][1] == cluster.link(0, 1)
    assert cluster.parallel_transfers is False


def test_round_trip(tmp_path: Path) -> None:
    value = {**with_links(default={**LINK, "send_us": 1.5, "receive_us_per_byte": 0.25}), "parallel_transfers": True}
    cluster = Cluster.from_json(value)
    cluster.save(tmp_path / "cluster.json")
    assert Cluster.load(tmp_path / "cluster.json") == cluster
    assert Cluster.from_json(json.loads(json.dumps(cluster.to_json()))) == cluster


def test_load_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text("{}")
    with pytest.raises(ClusterError, match=r"c\.json: a cluster needs a list"):
        Cluster.load(tmp_path / "c.json")


def test_uniform() -> None:
    cluster = Cluster.uniform(3, memory_bytes=5, link=Link(1.0, 2.0), prefix="cuda")
    assert [d.name for d in cluster.devices] == ["cuda:0", "cuda:1", "cuda:2"]
    assert {d.memory_bytes for d in cluster.devices} == {5}
    assert cluster.link(2, 0) == Link(1.0, 2.0)
    with pytest.raises(ClusterError, match="the number of devices is 0; expected at least 1"):
        Cluster.uniform(0)


def test_what_a_link_costs() -> None:
    link = Link(us_per_byte=2, latency_us=5, send_us=1, send_us_per_byte=0.5, receive_us=3, receive_us_per_byte=0.25)
    assert (link.transfer_us(10), link.sending_us(10), link.receiving_us(10)) == (25, 6, 5.5)
