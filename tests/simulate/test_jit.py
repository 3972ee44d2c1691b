"""Kernels: where they are kept, that what is kept is used, and Ctrl-C while they are compiled."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numba import types
from numba.core import event

from baechi_ext.simulate import jit
from baechi_ext.simulate.arrays import Indices, Ints

ROOT = Path(__file__).parent.parent.parent
SHOW = "import baechi_ext.simulate.simulate_kernel\nfrom baechi_ext.simulate.jit import cache_folder\nprint(cache_folder())"


def cache_folder(install: Path = ROOT, **environment: str) -> str:
    """The cache folder of a process that imports the package from `install`."""
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


def test_a_folder_with_kernels_need_not_be_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed, own = tmp_path / "installed", tmp_path / "own"
    monkeypatch.setattr(jit, "_candidates", lambda: iter((installed, own)))
    monkeypatch.setattr(jit, "_is_writable", lambda folder: folder.parent == own)
    name = jit.cache_folder().name
    (own / name).mkdir(parents=True)
    assert jit.cache_folder.__wrapped__() == own / name
    (installed / name).mkdir(parents=True)
    (installed / name / "any.nbi").touch()
    assert jit.cache_folder.__wrapped__() == installed / name


@pytest.mark.parametrize("kind", ["writable by all", "of somebody else", "a link"])
def test_a_folder_in_which_others_can_put_code_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    shared, own = tmp_path / "shared", tmp_path / "own"
    monkeypatch.setattr(jit, "_candidates", lambda: iter((shared, own)))
    name = jit.cache_folder().name
    (tmp_path / "elsewhere").mkdir()
    shared.mkdir()
    if kind == "a link":
        (shared / name).symlink_to(tmp_path / "elsewhere")
    else:
        (shared / name).mkdir()
    (shared / name / "any.nbi").touch()
    if kind == "writable by all":
        (shared / name).chmod(0o777)
    elif kind == "of somebody else":
        if os.geteuid():
            pytest.skip("only root can give folders away")
        os.chown(shared / name, 12345, 12345)
    assert jit.cache_folder.__wrapped__() == own / name


def test_the_folder_is_not_writable_by_all_whatever_the_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "_candidates", lambda: iter((tmp_path,)))
    before = os.umask(0)
    try:
        folder = jit.cache_folder.__wrapped__()
    finally:
        os.umask(before)
    assert folder is not None
    assert folder.parent == tmp_path


def third(n: int) -> int:
    return n // 3


third.__module__ = "third_kernel"


@pytest.mark.parametrize("length", [0, 1, 40])
@pytest.mark.parametrize("ending", ["nbi", "nbc"])
def test_a_kernel_whose_file_is_cut_short_is_compiled_and_saved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, length: int
) -> None:
    monkeypatch.setattr(jit, "cache_folder", lambda: tmp_path)
    monkeypatch.setitem(sys.modules, "third_kernel", sys.modules[__name__])
    compiled = jit.kernel(third)
    compiled(9)
    (file,) = tmp_path.glob(f"*.{ending}")
    os.truncate(file, length)
    left, under_way = tmp_path / f"{file.name}.tmp.0", tmp_path / f"{file.name}.tmp.1"
    left.touch()
    os.utime(left, (1, 1))
    under_way.touch()
    hits = []
    for _ in range(2):
        compiled = jit.kernel(third)
        assert compiled(9) == 3
        hits.append(sum(compiled.stats.cache_hits.values()))  # type: ignore[attr-defined]
    assert hits == [0, 1]
    assert (left.exists(), under_way.exists()) == (False, True)


def test_a_kernel_runs_where_it_cannot_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def half(n: int) -> int:
        return n // 2

    def refuse(_: object) -> None:
        raise PermissionError

    half.__module__ = "half_kernel"
    monkeypatch.setattr(jit._Locator, "ensure_cache_path", refuse)
    assert jit.kernel(half)(9) == 4


def test_a_changed_kernel_file_has_a_cache_of_its_own(install: Path) -> None:
    before = cache_folder(install)
    with (install / "baechi_ext" / "simulate" / "simulate_kernel.py").open("a") as file:
        file.write("# changed\n")
    assert cache_folder(install) != before


def test_machine_code_of_another_processor_is_in_a_folder_of_its_own() -> None:
    assert cache_folder(NUMBA_CPU_NAME="generic") != cache_folder()


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
    (tmp_path / "any.nbi").touch()
    assert not jit.is_first_use()
    monkeypatch.setattr(jit, "cache_folder", lambda: None)
    assert jit.is_first_use()


class _Presser(event.Listener):
    """Presses Ctrl-C so many times while a kernel is compiled, and notes how far that got."""

    def __init__(self, times: int, number: signal.Signals = signal.SIGINT) -> None:
        self.times, self.number, self.pressed, self.whole = times, number, 0, False

    def on_start(self, event: event.Event) -> None:
        while self.pressed < self.times:
            self.pressed += 1
            signal.raise_signal(self.number)
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


def test_sigterm_waits_for_a_kernel_where_ctrl_c_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "cache_folder", lambda: None)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN), signal.signal(signal.SIGTERM, signal.default_int_handler)
    doubled, presser = jit.kernel(lambda n: 2 * n), _Presser(1, signal.SIGTERM)
    try:
        with event.install_listener("numba:compile", presser), pytest.raises(KeyboardInterrupt):
            doubled(21)
        assert presser.whole
        assert doubled.signatures  # type: ignore[attr-defined]
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGTERM, before[1])
