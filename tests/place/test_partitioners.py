"""metis and scotch: what they are given, what they answer, and what is said where they are not installed."""

import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from baechi_ext.errors import MissingBackendError, SolverError
from baechi_ext.ir import Cluster, Device, Link
from baechi_ext.place import partitioners
from baechi_ext.place.common import PlaceOptions, begin
from baechi_ext.place.partitioners import Network, networks
from baechi_ext.place.registry import place
from tests.build import cluster_of, graph_of
from tests.place.training import branchy_blocks
from tests.processes import ended

ROOT = Path(__file__).parents[2]
each_partitioner = pytest.mark.parametrize("method", ["metis", "scotch"])
TOWERS = graph_of(
    {f"{tower}{i}": 10 for tower in "ab" for i in range(6)},
    *((f"{tower}{i}", f"{tower}{i + 1}", 50) for tower in "ab" for i in range(5)),
)
"""Two chains that nothing connects."""


def networks_of(graph, cluster):  # type: ignore[no-untyped-def]
    task = begin("metis", graph, cluster, PlaceOptions(seed=4, time_limit_seconds=9))
    return networks(task, graph.units())


def test_weights_are_times_and_transfer_times() -> None:
    """One link each way, 2 and 4 a byte: 3 on average. b-c is inside a group, so a and the group are the two vertices."""
    graph = graph_of({"a": 3, "b": 1, "c": 0}, ("a", "b", 2), ("b", "c", 9), colocation={"b": "g", "c": "g"})
    cluster = Cluster((Device("x", None, 3.0), Device("y", None, 1.0)), Link(2, 0), {("x", "y"): Link(4, 0)})
    (network,) = networks_of(graph, cluster)
    assert network.weights == (75_000_001, 25_000_001)
    assert network.edges == ({1: 50_000_001}, {0: 50_000_001})
    assert (network.shares, network.seed, network.time_limit_seconds) == ((0.75, 0.25), 4, 9)


def test_bytes_are_weights_too_where_they_are_limited() -> None:
    graph = graph_of({"a": 1, "b": 3}, persistent_bytes={"a": 30, "b": 10})
    cluster = Cluster((Device("x", 100, 1.0), Device("y", 300, 1.0)))
    assert [n.weights for n in networks_of(graph, cluster)] == [
        (25_000_001, 75_000_001),
        (75_000_001, 25_000_001),
        (50_000_001, 50_000_001),
    ]
    assert [n.shares for n in networks_of(graph, cluster)] == [(0.5, 0.5), (0.25, 0.75), (0.375, 0.625)]


@each_partitioner
def test_independent_towers_are_cut_apart(method: str, capfd: pytest.CaptureFixture[str]) -> None:
    result = place(method, TOWERS, cluster_of(2))
    assert (result.predicted_step_us, result.status) == (60, "optimal")
    assert capfd.readouterr() == ("", "")


@each_partitioner
def test_a_device_three_times_as_fast_gets_three_quarters(method: str) -> None:
    graph = graph_of({f"o{i}": 1 for i in range(40)})
    result = place(method, graph, cluster_of(2, speeds=(1.0, 3.0)))
    assert result.plan.placement.count(1) == pytest.approx(30, abs=2)


@each_partitioner
def test_parts_go_to_the_devices_with_the_near_links(method: str) -> None:
    """One tensor of one byte between two halves, far from x to y; one of the three devices is left out or gets the slow link."""
    graph = graph_of({"a": 10, "b": 10}, ("a", "b", 1))
    far = Link(0, 1000)
    cluster = Cluster((Device("x"), Device("y")), Link(0, 1), {("x", "y"): far})
    assert place(method, graph, cluster).predicted_step_us <= 21


@each_partitioner
def test_a_device_without_memory_is_left_out(method: str) -> None:
    graph = graph_of({"a": 10, "b": 10, "c": 10}, ("a", "b", 1), ("b", "c", 1), persistent_bytes=dict.fromkeys("abc", 4))
    cluster = Cluster((Device("x", 0), Device("y", 20), Device("z", 20)), Link(0, 1))
    assert 0 not in place(method, graph, cluster).plan.placement


@each_partitioner
@pytest.mark.parametrize("devices", [3, 5, 8])
def test_nothing_is_printed_and_the_answer_is_the_same(method: str, devices: int, capfd: pytest.CaptureFixture[str]) -> None:
    graph, cluster = branchy_blocks(4, 3, 1), Cluster.uniform(devices, link=Link(1e-4, 30))
    plans = [place(method, graph, cluster, PlaceOptions(seed=2)).plan for _ in range(2)]
    assert plans[0].placement == plans[1].placement
    assert capfd.readouterr() == ("", "")


def test_metis_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pymetis", None)
    with pytest.raises(MissingBackendError, match="pip install pymetis"):
        place("metis", TOWERS, cluster_of(2))


# Scotch's files and its program. The program itself runs in the tests above, where it is installed.

SMALL = Network(({1: 7}, {0: 7, 2: 5}, {1: 5}), (4, 2, 1), (0.75, 0.25), 0, 60.0)


def test_the_source_graph_file() -> None:
    assert partitioners.source_text(SMALL) == "0\n3 4\n0 011\n4 1 7 1\n2 2 7 0 5 2\n1 1 5 1\n"


def test_the_target_file() -> None:
    assert partitioners.target_text(SMALL) == "cmpltw\n2\n10000 3333\n"


def test_the_mapping_file() -> None:
    assert partitioners.parse_mapping("3\n0\t1\n2\t0\n1\t1\n", 3) == [1, 1, 0]
    for text in ("", "3\n0\t1\n", "3\n0 1 2\n", "3\na b\n"):
        with pytest.raises(SolverError, match="an invalid mapping"):
            partitioners.parse_mapping(text, 3)


def program(folder: Path, script: str, name: str = "scotch_gmap") -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo broken >&2; exit 3", "ended with status 3 and said: broken"),
        ("exit 0", "ended with status 0 and said: nothing"),
        ("sleep 30", "did not finish within 0.2 s; raise --time_limit"),
        ("kill -SEGV $$", "ended with status -11"),
    ],
)
def test_a_program_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(SolverError, match=message):
        partitioners.partition(str(program(tmp_path, f"exec {script}" if script.startswith("sleep") else script)),
                         Network(SMALL.edges, SMALL.weights, SMALL.shares, 0, 0.2 if "sleep" in script else 30.0))  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["scotch_gmap"]


KILLED = """
import os, signal, sys, threading, time
from pathlib import Path
from baechi_ext.place.partitioners import Network, partition
def kill():
    while not Path(sys.argv[2]).exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
threading.Thread(target=kill).start()
partition(sys.argv[1], Network(({1: 1}, {0: 1}), (1, 1), (0.5, 0.5), 0, 60.0))
"""


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks at /proc")
def test_the_program_ends_with_a_command_that_is_killed(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    mapper = program(tmp_path, f"echo $$ > {begun}.new; mv {begun}.new {begun}; exec sleep 60")
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", KILLED, str(mapper), str(begun)], env=environment, cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    assert ended([int(begun.read_text())], 30)


def test_scotch_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingBackendError, match="apt-get install scotch"):
        place("scotch", TOWERS, cluster_of(2))


def test_a_gmap_for_genomes_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    program(tmp_path, "echo 'GMAP: genomic mapping and alignment'", "gmap")
    with pytest.raises(MissingBackendError, match="scotch_gmap or gmap"):
        partitioners.find_program()
    found = program(tmp_path, "echo 'gmap/gpart, version 7.0.3' >&2", "gmap")
    assert partitioners.find_program() == str(found)
