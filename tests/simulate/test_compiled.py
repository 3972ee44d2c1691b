"""The compiled simulator against the plain one: the same timeline, bit for bit, whatever the costs; and where it is kept."""

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import types
from numba.core import event

from baechi_ext.ir import Cluster, Device, Link, Op, OpGraph
from baechi_ext.simulate import AdaptiveSimulator, Simulator, adaptive, jit
from baechi_ext.simulate.arrays import Indices, Ints
from baechi_ext.simulate.compiled import CompiledSimulator
from tests.simulate.strategies import cases
from tests.simulate.test_against_reference import draw_plan

Case = tuple[OpGraph, Cluster]
ROOT = Path(__file__).parent.parent.parent
SCALES = st.sampled_from([1.0, 0.1, 1 / 3, 1e-9, 1e9, 1e13])


def rescaled(case: Case, data: st.DataObject) -> Case:
    """The case with times and links that no float holds exactly, up to those that others are lost in."""
    graph, cluster = case
    ops = [replace(op, compute_us=op.compute_us * data.draw(SCALES)) for op in graph.ops]
    costs = ("us_per_byte", "latency_us", "send_us", "send_us_per_byte", "receive_us", "receive_us_per_byte")

    def scaled(link: Link) -> Link:
        return Link(**{name: getattr(link, name) * data.draw(SCALES) for name in costs})

    devices = tuple(replace(d, speed=d.speed * data.draw(st.sampled_from([1.0, 1.0, 0.7, 3.3]))) for d in cluster.devices)
    pairs = {ends: scaled(link) for ends, link in cluster.pairs.items()}
    return graph.replace_ops(ops), replace(cluster, devices=devices, default=scaled(cluster.default), pairs=pairs)


def check_equal(case: Case, data: st.DataObject) -> None:
    graph, cluster = case
    plain, compiled = Simulator(graph, cluster), CompiledSimulator(graph, cluster)
    assert compiled.tails_us == plain.tails_us
    for _ in range(2):
        placement, priority = draw_plan(data, graph, cluster)
        expected, timeline = plain.run(placement, priority), compiled.run(placement, priority)
        assert timeline == expected
        assert list(map(repr, timeline.start_us)) == list(map(repr, expected.start_us))
        assert compiled.evaluate(placement, priority) == (expected.makespan_us, expected.peak_memory_bytes)


@settings(max_examples=400, deadline=None)
@given(cases(), st.data())
def test_the_same_timeline_with_many_ties(case: Case, data: st.DataObject) -> None:
    check_equal(case, data)


@settings(max_examples=300, deadline=None)
@given(cases(), st.data())
def test_the_same_timeline_with_any_costs(case: Case, data: st.DataObject) -> None:
    check_equal(rescaled(case, data), data)


@pytest.mark.parametrize("parallel", [False, True])
def test_a_large_graph_with_a_tensor_that_everybody_reads(parallel: bool) -> None:
    n, k = 600, 14
    ops = [Op(f"o{v}", compute_us=(v * 37) % 11 / 7, persistent_bytes=v, output_bytes=v % 50, temporary_bytes=v % 3) for v in range(n)]
    edges = [("o0", f"o{v}", 64, "all") for v in range(1, n)]
    edges += [(f"o{v}", f"o{v + 1 + (v * v) % 5}", v % 13, f"x{v % 2}") for v in range(n - 6)]
    edges += [("o1", f"o{v}", 5, f"own{v}") for v in range(2, n)]
    graph = OpGraph.from_edges(ops, edges)
    cluster = Cluster(tuple(Device(f"d{i}", speed=1 + i / 10) for i in range(k)), Link(0.01, 0.1), parallel_transfers=parallel)
    plain, compiled = Simulator(graph, cluster), CompiledSimulator(graph, cluster)
    for step in (1, 3, 5):
        placement = [(v * step) % k for v in range(n)]
        for priority in (None, [(v * 7) % 40 for v in range(n)]):
            assert compiled.run(placement, priority) == plain.run(placement, priority)


def test_graphs_without_ops_or_edges() -> None:
    for ops in ([], [Op("a", compute_us=3.0)]):
        graph, cluster = OpGraph.from_edges(ops, []), Cluster.uniform(2)
        assert CompiledSimulator(graph, cluster).run([1] * len(ops)) == Simulator(graph, cluster).run([1] * len(ops))


# One after the other


@settings(deadline=None)
@given(cases(), st.data())
def test_an_adaptive_simulator_says_the_same_from_first_to_last(case: Case, data: st.DataObject) -> None:
    graph, cluster = rescaled(case, data)
    if data.draw(st.booleans()):
        graph = graph.replace_ops([replace(op, temporary_bytes=op.temporary_bytes / 3 + 1e-9) for op in graph.ops])
    plain, simulator = Simulator(graph, cluster), AdaptiveSimulator(graph, cluster)
    placement, priority = draw_plan(data, graph, cluster)
    expected = plain.run(placement, priority)
    for left in (1, 0, 0):
        simulator._ops_left = left
        assert simulator.run(placement, priority) == expected
        assert simulator.evaluate(placement, priority) == (expected.makespan_us, expected.peak_memory_bytes)


def test_few_runs_are_plain_and_many_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptive, "_is_loaded", lambda: False)
    graph = OpGraph.from_edges([Op(f"o{v}") for v in range(adaptive.PLAIN_OPS // 3)], [])
    simulator = AdaptiveSimulator(graph, Cluster.uniform(1))
    kinds = [type(simulator._simulator()) for _ in range(5)]
    assert kinds == [Simulator] * 4 + [CompiledSimulator]
    monkeypatch.setattr(adaptive, "_is_loaded", lambda: True)
    assert type(AdaptiveSimulator(graph, Cluster.uniform(1))._simulator()) is CompiledSimulator


# The cache

SHOW = "import baechi_ext.simulate.compiled\nfrom baechi_ext.simulate.jit import cache_folder\nprint(cache_folder())"


def cache_folder(install: Path = ROOT, **environment: str) -> str:
    """What a process finds that imports the package from `install`."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")}
    inherited |= {"PYTHONPATH": str(install), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", SHOW]
    done = subprocess.run(command, cwd=install, env=inherited | environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def install(tmp_path: Path) -> Path:
    """A copy of the package, without anything compiled."""
    shutil.copytree(ROOT / "baechi_ext", tmp_path / "install" / "baechi_ext", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "install"


def test_kernels_are_kept_beside_the_sources(install: Path) -> None:
    assert Path(cache_folder(install)).parent == install / "baechi_ext" / "simulate" / "__pycache__"


def test_the_folder_that_numba_is_told_comes_first(tmp_path: Path) -> None:
    assert Path(cache_folder(NUMBA_CACHE_DIR=str(tmp_path))).parent == tmp_path


def test_an_install_that_cannot_be_written_uses_the_users_cache_or_none(install: Path, tmp_path: Path) -> None:
    blocked = install / "baechi_ext" / "simulate" / "__pycache__"
    blocked.write_text("a file where the folder would be")
    home = tmp_path / "cache"
    assert Path(cache_folder(install, XDG_CACHE_HOME=str(home))).parent == home / "baechi-ext"
    assert cache_folder(install, XDG_CACHE_HOME=str(blocked)) == "None"


def test_a_changed_kernel_file_has_a_cache_of_its_own(install: Path) -> None:
    before = cache_folder(install)
    with (install / "baechi_ext" / "simulate" / "simulate_kernel.py").open("a") as file:
        file.write("# changed\n")
    assert cache_folder(install) != before


@jit.part
def _half(n: int) -> int:
    return n // 2


@jit.kernel
def _halves(narrow: Ints, unsigned: Indices) -> int:
    return _half(narrow[0]) + _half(unsigned[0]) + _half(len(narrow)) + _half(8)


def test_a_part_is_compiled_once_for_integers_of_all_widths() -> None:
    assert _halves(np.array([-3], np.int32), np.array([2**32 - 1], np.uint32)) == -2 + 2**31 - 1 + 0 + 4
    for width in (types.int32, types.uint32, types.int64, types.literal(7)):
        _half.get_call_template((width,), {})
    assert [list(map(str, arguments)) for arguments in _half.signatures] == [["int64"]]


def test_first_use_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "cache_folder", lambda: tmp_path)
    assert jit.is_first_use()
    (tmp_path / "kernel.nbi").touch()
    assert not jit.is_first_use()
    monkeypatch.setattr(jit, "cache_folder", lambda: None)
    assert jit.is_first_use()


class _Presser(event.Listener):
    """Presses Ctrl-C so many times while a kernel is compiled, and notes how far that got."""

    def __init__(self, times: int) -> None:
        self.times, self.pressed, self.whole = times, 0, False

    def on_start(self, event: event.Event) -> None:
        while self.pressed < self.times:
            self.pressed += 1
            signal.raise_signal(signal.SIGINT)
        self.whole = True

    def on_end(self, event: event.Event) -> None:
        pass


@pytest.mark.parametrize(("times", "whole"), [(1, True), (2, False)])
def test_ctrl_c_waits_for_a_kernel_that_is_compiled_unless_it_is_pressed_twice(
    monkeypatch: pytest.MonkeyPatch, times: int, whole: bool
) -> None:
    monkeypatch.setattr(jit, "cache_folder", lambda: None)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    doubled, presser = jit.kernel(lambda n: 2 * n), _Presser(times)
    try:
        with event.install_listener("numba:compile", presser), pytest.raises(KeyboardInterrupt):
            doubled(21)
        assert (presser.pressed, presser.whole) == (times, whole)
        assert bool(doubled.signatures) == whole  # type: ignore[attr-defined]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert doubled(21) == 42
    finally:
        signal.signal(signal.SIGINT, before)
