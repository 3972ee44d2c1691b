"""The lock that a run has on a folder it writes into: a file that says which process of which machine writes there, and goes with the run.

A lock that a killed run left is taken over. On the machine of that process, and among processes that see each other, it is known whether it
still runs: the time at which it was started tells it from a later one of the same number. Elsewhere it is judged by its signs of life:
whoever has a lock touches the file every few seconds, and one that is old and is not touched while somebody waits is nobody's. Ages are
differences of times that the file system itself gave, so the machines' clocks do not matter.
"""

import contextlib
import json
import os
import platform
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from baechi_ext.errors import FileError
from baechi_ext.ir.files import make_folder

NAME = ".baechi_lock"
BEAT_SECONDS = 5.0
SILENT_SECONDS = 60.0
"""Without a sign of life for this long, a lock is watched for a while and then taken over."""
_WATCHED_BEATS = 3


@contextlib.contextmanager
def locked(folders: Mapping[str, str | Path | None]) -> Iterator[None]:
    """While its body runs, no other run writes into these folders; the keys are the flags that name them. Folders that are not there are
    made, and those that stayed empty removed again. A process that this run started has the lock as well.

    Raises FileError, which names the process that writes there, or why nobody can.
    """
    with contextlib.ExitStack() as stack:
        for path, flag in {os.path.realpath(folder): flag for flag, folder in folders.items() if folder is not None}.items():
            stack.enter_context(_one_locked(Path(path), f"{flag}={folders[flag]}"))
        yield


@contextlib.contextmanager
def _one_locked(folder: Path, flag: str) -> Iterator[None]:
    new = not folder.exists()
    make_folder(folder)
    file, own = folder / NAME, _about(os.getpid())
    if not _take(file, own, flag):
        yield
        return
    done = threading.Event()
    beats = threading.Thread(target=_beat, args=(file, done), name="baechi lock", daemon=True)
    beats.start()
    try:
        yield
    finally:
        if os.getpid() == own["pid"]:  # not a fork of it
            done.set()
            if _read(file) == own:
                file.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                if new:
                    folder.rmdir()


def _beat(file: Path, done: threading.Event) -> None:
    while not done.wait(BEAT_SECONDS):
        with contextlib.suppress(OSError):
            os.utime(file)


def _take(file: Path, own: Mapping[str, Any], flag: str) -> bool:
    """Makes the lock. False where a process has it that this one was started by."""
    name = flag.partition("=")[0]
    while True:
        try:
            with file.open("x", encoding="utf-8") as new:
                json.dump(own, new)
            return True
        except FileExistsError:
            held = _read(file)
        except OSError as e:
            raise FileError(f"cannot write {str(file)!r}: {e.strerror}; choose another {name}") from e
        if held is not None and _is_ancestor(held):
            return False
        if held is None and not file.exists():
            continue
        if _runs(file, held):
            raise FileError(f"another run{_said_of(held)} writes into {flag}; wait until it ends, or choose another {name}")
        _remove(file, held)


def _said_of(held: Mapping[str, Any] | None) -> str:
    return "" if held is None else f", process {held['pid']} on {held['host']},"


def _runs(file: Path, held: Mapping[str, Any] | None) -> bool:
    """True if whoever has the lock still runs."""
    if held is not None and None not in held.values():
        own = _about(held["pid"])
        if own["host"] == held["host"] and own["boot"] != held["boot"]:
            return False  # the machine was started anew
        if own["boot"] == held["boot"] and own["processes"] == held["processes"]:
            return bool(own["started"] == held["started"])
    seen = _touched(file)
    if seen is None or _now(file) - seen < SILENT_SECONDS:
        return seen is not None
    for _ in range(_WATCHED_BEATS):
        time.sleep(BEAT_SECONDS)
        if _touched(file) != seen:
            return True
    return False


def _touched(file: Path) -> float | None:
    with contextlib.suppress(OSError):
        return file.stat().st_mtime
    return None


def _now(file: Path) -> float:
    """The time by the clock of the file system."""
    probe = file.with_name(f"{NAME}.{os.getpid()}")
    try:
        probe.touch()
        return probe.stat().st_mtime
    except OSError as e:
        raise FileError(f"cannot write {str(probe)!r}: {e.strerror}; choose another folder") from e
    finally:
        probe.unlink(missing_ok=True)


def _remove(file: Path, held: Mapping[str, Any] | None) -> None:
    """Removes a lock that is nobody's. Of several that try, one moves it away; a new one, which was moved by mistake, goes back."""
    aside = file.with_name(f"{NAME}.{os.getpid()}")
    with contextlib.suppress(OSError):
        os.rename(file, aside)
        if _read(aside) != held:
            with contextlib.suppress(FileExistsError):
                os.link(aside, file)
        aside.unlink()


def _read(file: Path) -> dict[str, Any] | None:
    """The process that a lock names; None where it makes no sense, or is gone."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads(file.read_bytes()[:4096])
        if isinstance(found, dict) and isinstance(found.get("pid"), int) and found.keys() == _about(0).keys():
            return {**found, "host": str(found["host"])[:64]}
    return None


def _about(pid: int) -> dict[str, Any]:
    """A process of this machine, so that no other one is taken for it; `started` is None where there is none."""
    fields = _stat(pid)
    boot, processes = None, None
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        processes = os.readlink("/proc/self/ns/pid")
    started = None if not fields or fields[0] in "ZX" else int(fields[19])
    return {"pid": pid, "host": platform.node()[:64], "boot": boot, "processes": processes, "started": started}


def _stat(pid: int) -> list[str]:
    """The fields of Linux's /proc/PID/stat, from the state on; empty where there is no such process."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return []


def _is_ancestor(held: Mapping[str, Any]) -> bool:
    """True if this process, or one that it was started by, has the lock."""
    pid = os.getpid()
    while pid and held["pid"] != pid:
        fields = _stat(pid)
        pid = int(fields[1]) if fields else 0
    return bool(pid) and _about(pid) == held
