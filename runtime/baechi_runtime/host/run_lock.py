"""The lock that a run has on a folder it writes into: a file that the system keeps locked (flock) while the run's process lives, and
that says which process of which machine that is. What a killed run left is nobody's at once.

Machines that share a file system see each other's locks where that has locks at all, as NFS has; one that has none keeps nobody out.
"""

import contextlib
import fcntl
import json
import os
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path

from baechi_ext.errors import FileError
from baechi_ext.ir.files import make_folder

NAME = ".baechi_lock"
_HELD = "BAECHI_LOCKED"
"""The folders, in JSON, that the processes have locked which this one was started by."""


@contextlib.contextmanager
def locked(folders: Mapping[str, str | Path | None]) -> Iterator[None]:
    """While its body runs, no other run writes into these folders; the keys are the flags that name them. Folders that are not there are
    made, and those that stayed empty removed again. A process that this run started has the lock as well.

    Raises FileError, which names the process that writes there, or why nobody can.
    """
    before = os.environ.get(_HELD)
    held = _folders(before)
    with contextlib.ExitStack() as stack:
        for path, flag in {os.path.realpath(folder): flag for flag, folder in folders.items() if folder is not None}.items():
            # What a run started may outlive it: then the folder is nobody's.
            with contextlib.suppress(*[FileError] if path in held else []):
                stack.enter_context(_one_locked(Path(path), f"{flag}={folders[flag]}"))
            held.append(path)
        os.environ[_HELD] = json.dumps(list(dict.fromkeys(held)))
        try:
            yield
        finally:
            os.environ[_HELD] = before or "[]"


def _folders(text: str | None) -> list[str]:
    """The folders in that variable; none where somebody else has set it."""
    with contextlib.suppress(ValueError, RecursionError):
        held = json.loads(text or "[]")
        return [folder for folder in held if isinstance(folder, str)] if isinstance(held, list) else []
    return []


@contextlib.contextmanager
def _one_locked(folder: Path, flag: str) -> Iterator[None]:
    new, owner = not folder.exists(), os.getpid()
    make_folder(folder)
    descriptor = _taken(folder / NAME, flag)
    try:
        with contextlib.suppress(OSError):  # on a full disk the lock holds without a name
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps({"pid": owner, "host": platform.node()[:64]}).encode(), 0)
        yield
    finally:
        try:
            if os.getpid() == owner:  # not a fork of it
                with contextlib.suppress(OSError):  # what became of the run says more
                    (folder / NAME).unlink(missing_ok=True)
                    if new:
                        folder.rmdir()
        finally:
            os.close(descriptor)


def _taken(file: Path, flag: str) -> int:
    """The descriptor of the locked file."""
    name = flag.partition("=")[0]
    while True:
        descriptor, is_ours = _opened(file, name)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FileError(
                f"another run{_said_by(descriptor)} writes into {flag}; wait until it ends, or choose another {name}"
            ) from None
        except OSError:  # a file system without locks
            return descriptor
        with contextlib.suppress(FileNotFoundError):
            if file.stat().st_ino == os.fstat(descriptor).st_ino:
                if is_ours:
                    return descriptor
                _remove(file, name)
        os.close(descriptor)  # whoever had it has removed the file meanwhile, or another user's run was killed


def _opened(file: Path, name: str) -> tuple[int, bool]:
    """The descriptor of the file, and True if it can be written; else it is another user's."""
    flags = os.O_CLOEXEC
    try:
        return os.open(file, os.O_RDWR | os.O_CREAT | flags, 0o666), True
    except OSError as e:
        with contextlib.suppress(OSError):
            return os.open(file, os.O_RDONLY | flags), False
        raise _cannot_write(file, e, name) from e


def _remove(file: Path, name: str) -> None:
    try:
        file.unlink()
    except OSError as e:
        raise _cannot_write(file, e, name) from e


def _cannot_write(file: Path, error: OSError, name: str) -> FileError:
    return FileError(f"cannot write {str(file)!r}: {error.strerror}; choose another {name}")


def _said_by(descriptor: int) -> str:
    """The process that the file names, in words; empty where it makes no sense. The file is closed."""
    with os.fdopen(descriptor, "rb") as file, contextlib.suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        held = json.loads(file.read(4096))
        return f", process {int(held['pid'])} on {str(held['host'])[:64]},"
    return ""
