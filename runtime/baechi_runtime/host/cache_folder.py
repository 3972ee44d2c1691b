"""The folder in which runs keep what later runs may use again: where it is, how keys are made, and how it stays small.

Anything in it can be lost at any time, and may be damaged: whoever reads an entry checks it, and does without a damaged one.
"""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baechi_ext.errors import FileError
from baechi_ext.ir.numbers import as_number

VARIABLE = "BAECHI_CACHE"
MOST_BYTES = 256 * 1024 * 1024
"""The limit for each kind of entry. Beyond it, those go that have not been used for longest."""
MOST_SECONDS = 30 * 24 * 3600
"""Older entries are measured again: others may have been at work when they were made, or the machine may have changed since."""
_FORMAT = 1
"""Goes up when the meaning of what is kept changes: older entries are not found any more."""
_LEFT_BEHIND_SECONDS = 3600
"""A file left half-written for this long belongs to a process that has ended."""


def cache_folder() -> Path | None:
    """$BAECHI_CACHE; else `baechi` in $XDG_CACHE_HOME, or in ~/.cache. None where there is no home either. It need not exist."""
    if given := os.environ.get(VARIABLE):
        return Path(given)
    shared = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(shared):  # others are to be ignored, by the rules of that variable
        return Path(shared) / "baechi"
    try:
        return Path.home() / ".cache" / "baechi"
    except RuntimeError:
        return None


def key_of(parts: Mapping[str, Any]) -> str:
    """The SHA-256 of these parts, which are JSON values: equal parts have equal keys."""
    text = json.dumps({"format": _FORMAT, **parts}, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def is_fresh(kept_seconds: Any) -> bool:
    """True if what was kept at that time, in seconds since 1970, may still be used. The clock may have been set back since."""
    try:
        age_seconds = time.time() - as_number(kept_seconds, "kept_seconds", FileError)
    except FileError:
        return False
    return -MOST_SECONDS < age_seconds < MOST_SECONDS


def open_folder(folder: Path) -> str:
    """Makes the folder, for its owner alone. Returns why files can't be written there; empty where they can."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as e:
        return e.strerror or str(e)
    return "" if os.access(folder, os.W_OK | os.X_OK) else "it is not writable"


def touch(file: Path) -> None:
    """Notes that an entry was used."""
    with contextlib.suppress(OSError):
        os.utime(file)


def trim(folder: Path, most_bytes: int = MOST_BYTES) -> None:
    """Deletes the entries that have not been used for longest, until the rest is no larger. An entry's files are called KEY.*"""
    entries: dict[str, list[tuple[Path, os.stat_result]]] = {}
    for file in _files(folder):
        with contextlib.suppress(OSError):  # another process deletes, too
            found = file.stat()
            if not file.name.startswith("."):
                entries.setdefault(file.name.split(".")[0], []).append((file, found))
            elif file.suffix == ".tmp" and time.time() - found.st_mtime > _LEFT_BEHIND_SECONDS:
                file.unlink()
    held = 0
    for files in sorted(entries.values(), key=lambda files: -max(stat.st_mtime for _, stat in files)):
        held += sum(stat.st_size for _, stat in files)
        if held > most_bytes:
            for file, _ in files:
                with contextlib.suppress(OSError):
                    file.unlink()


def _files(folder: Path) -> list[Path]:
    try:
        return [file for file in folder.iterdir() if file.is_file()]
    except OSError:
        return []
