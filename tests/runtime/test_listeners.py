"""Nobody outside can connect to a run on one machine: every port of it is tried from another node; and what a kept listener takes."""

import ipaddress
import json
import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from baechi_runtime.host.listeners import LOOPBACK, own_networks, towards
from baechi_runtime.torch.processes.environment import meeting_place
from tests.runtime.namespaces import ADDRESSES, require_namespaces, two_nodes

LINK, EQUAL = "--comm_cost_coeffs=0.001,100", "--device_speeds=1"
SMALL = ("--model_name=wide_towers", "--image_size=8", "--batch_size=2", "--num_steps=100000", LINK, EQUAL)
BAECHI = ("-m", "baechi_ext", "train", *SMALL)
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "baechi_ext", "train", *SMALL)
PROCESSES = ("--workers=process", "--placement_method=m_etf")


def looked_at(folder: Path, command: tuple[str, ...]) -> tuple[list[int], list[int]]:
    """The ports that the command listens at, and those of them that another node can connect to."""
    require_namespaces()
    watched = ("-m", "tests.runtime.watched_run")
    first, second = two_nodes([[*watched, "run", str(folder), *command], [*watched, "look", str(folder), ADDRESSES[0]]])
    assert (first["code"], second["code"]) == (0, 0), first["err"] + second["err"]
    found, taken = json.loads(first["out"]), json.loads(second["out"])
    assert found["open"] in taken, "the nodes see nothing of each other"
    return found["listened"], [port for port in taken if port != found["open"]]


def test_worker_processes(tmp_path: Path) -> None:
    """The store, and a socket of gloo's in each worker."""
    listened, taken = looked_at(tmp_path, (*BAECHI, *PROCESSES))
    assert len(listened) == 3
    assert taken == []


def test_split_layers(tmp_path: Path) -> None:
    listened, taken = looked_at(tmp_path, (*(word for word in BAECHI if word not in (EQUAL, LINK)), "--sharding=pase"))
    assert len(listened) >= 3
    assert taken == []


@pytest.mark.skipif(find_spec("tensorflow") is None, reason="tensorflow is not installed")
def test_servers_of_tensorflow(tmp_path: Path) -> None:
    tiny = ("--image_size=2", "--d_model=8", "--num_layers=1", "--placement_method=contiguous")
    listened, taken = looked_at(tmp_path, (*BAECHI, "--framework=tensorflow", *tiny))
    assert len(listened) >= 2
    assert taken == []


def test_under_torchrun_its_own_stores_alone_are_open(tmp_path: Path) -> None:
    """Two of torchrun's, which no flag of its closes; docs/several_nodes.md says so."""
    listened, taken = looked_at(tmp_path, (*TORCHRUN, *PROCESSES))
    assert len(listened) == 4
    assert len(taken) == 2


CONNECTIONS = """
import ipaddress, socket, sys
from baechi_runtime.host.listeners import keep_listeners_to

def taken(address):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as peer:
        peer.settimeout(0.25)
        try:
            peer.connect((address, port))
            return "taken"
        except OSError:
            return "not taken"

listener = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
port = listener.getsockname()[1]
if "early" in sys.argv:
    early = socket.create_connection(("127.0.0.2", port))
print("before:", keep_listeners_to([ipaddress.ip_network(n) for n in sys.argv[1].split(",")]))
for address in ("127.0.0.1", "127.0.0.2", "::1"):
    print(address, taken(address))
"""


@pytest.mark.parametrize(
    ("networks", "expected"),
    [
        ("127.0.0.0/8,::1/128", ["taken", "taken", "taken"]),
        ("127.0.0.1/32", ["taken", "not taken", "not taken"]),
        ("10.0.0.0/8,127.0.0.2/32,::1/128", ["not taken", "taken", "taken"]),
        ("::1/128", ["not taken", "not taken", "taken"]),
        ("::2/128,127.0.0.1/32", ["taken", "not taken", "not taken"]),
        ("10.0.0.0/8", ["not taken", "not taken", "not taken"]),
    ],
)
def test_a_kept_listener_takes_what_was_sent_to_these_addresses(networks: str, expected: list[str]) -> None:
    out = said_of_connections(networks)
    assert [line.split(" ", 1)[1] for line in out] == ["", *expected]


def test_who_came_before_is_named() -> None:
    assert said_of_connections("127.0.0.1/32", "early")[0] == "before: 127.0.0.1"
    assert said_of_connections("127.0.0.0/8", "early")[0] == "before: "


def said_of_connections(*arguments: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", CONNECTIONS, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_addresses_by_which_others_find_this_machine() -> None:
    assert own_networks("localhost", ["127.0.0.1"]) == LOOPBACK
    assert own_networks("203.0.113.7", []) == ()
    outside = towards("198.51.100.1")
    if outside is not None and not ipaddress.ip_address(outside).is_loopback:
        assert own_networks("127.0.1.1", ["198.51.100.1"]) == (*LOOPBACK, ipaddress.ip_network(outside))


def test_a_store_of_rank_0_is_at_its_address_alone() -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    descriptor = meeting_place(environment)
    with socket.socket(fileno=descriptor) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    assert meeting_place({**environment, "RANK": "1"}) is None
    assert meeting_place({**environment, "TORCHELASTIC_USE_AGENT_STORE": "True"}) is None
    assert meeting_place({**environment, "MASTER_ADDR": "203.0.113.7"}) is None
    assert not os.path.exists(f"/proc/self/fd/{descriptor}")
