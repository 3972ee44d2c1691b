"""The folder in which runs keep what later runs may use again: where it is, how keys and entries are made, and how it stays small.

Anything in it can be lost at any time, and may be damaged: whoever reads an entry checks it, and does without a damaged one.
"""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from baechi_ext.errors import BaechiError, FileError
from baechi_ext.ir.files import SCHEMA_VERSION, read_json, write_json
from baechi_ext.ir.numbers import as_number

VARIABLE = "BAECHI_CACHE"
MOST_BYTES = 256 * 1024 * 1024
"""The limit for each kind of entry. Beyond it, those go that have not been used for longest."""
MOST_SECONDS = 30 * 24 * 3600
"""Older entries are measured again: others may have been at work when they were made, or the machine may have changed since."""
_FORMAT = 2
"""Goes up when the meaning of what is kept changes: older entries are not found any more."""
_LEFT_BEHIND_SECONDS = 3600
"""A file left half-written for this long belongs to a process that has ended."""


def cache_folder() -> Path | None:
    """$BAECHI_CACHE; else `baechi` in $XDG_CACHE_HOME, or in ~/.cache. None where there is no home either. It need not exist."""
    if given := os.environ.get(VARIABLE):
        return _anchored(given)
    shared = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(shared):  # others are to be ignored, by the rules of that variable
        return Path(shared) / "baechi"
    try:
        return Path.home() / ".cache" / "baechi"
    except RuntimeError:
        return None


@cache
def _anchored(given: str) -> Path:
    """A relative folder is below the one that this process was in when it was first asked for: scripts go elsewhere."""
    with contextlib.suppress(OSError):  # the folder is gone
        return Path(given).absolute()
    return Path(given)


def key_of(parts: Mapping[str, Any]) -> str:
    """The SHA-256 of these parts, which are JSON values: equal parts have equal keys."""
    text = json.dumps({"format": _FORMAT, **parts}, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def find_entry(folder: Path, name: str, key: str) -> dict[str, Any] | None:
    """The entry in the file `name`, with the key in place of {}, which counts as used now; None where there is none, it is of another
    key, or old."""
    file = folder / name.format(key)
    try:
        entry = read_json(file, "entry")
        if entry.get("key") != key or not _is_fresh(entry.get("kept_seconds")):
            return None
    except (BaechiError, OSError):
        return None
    with contextlib.suppress(OSError):
        os.utime(file)
    return entry


def keep_entry(folder: Path, name: str, key: str, entry: Mapping[str, Any], most_bytes: int = MOST_BYTES) -> str:
    """Writes an entry, in place of the one before; the reason where that was not possible, else nothing."""
    file = folder / name.format(key)
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # What a power cut leaves of it is no entry, and asked for anew.
        write_json(file, {"schema_version": SCHEMA_VERSION, "key": key, "kept_seconds": time.time(), **entry}, durable=False)
    except (FileError, OSError, ValueError) as e:  # a time that is no number has no JSON
        return getattr(e, "strerror", None) or str(e)
    trim(file.parent, most_bytes)
    return ""


def _is_fresh(kept_seconds: Any) -> bool:
    """True if what was kept at that time, in seconds since 1970, may still be used. The clock may have been set back since."""
    age_seconds = time.time() - as_number(kept_seconds, "kept_seconds", FileError)
    return -MOST_SECONDS < age_seconds < MOST_SECONDS


def trim(folder: Path, most_bytes: int = MOST_BYTES) -> None:
    """Deletes the entries that have not been used for longest, until the rest is no larger."""
    entries: list[tuple[float, int, Path]] = []
    for file in _files(folder):
        with contextlib.suppress(OSError):  # another process deletes, too
            found = file.stat()
            if not file.name.startswith("."):
                entries.append((found.st_mtime, found.st_size, file))
            elif file.suffix == ".tmp" and time.time() - found.st_mtime > _LEFT_BEHIND_SECONDS:
                file.unlink()
    held = 0
    for _, size, file in sorted(entries, reverse=True):
        held += size
        if held > most_bytes:
            with contextlib.suppress(OSError):
                file.unlink()


def _files(folder: Path) -> list[Path]:
    try:
        return [file for file in folder.iterdir() if file.is_file()]
    except OSError:
        return []
