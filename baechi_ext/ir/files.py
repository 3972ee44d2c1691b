"""Reading and writing the project's JSON files: strict on the way in, atomic on the way out. Compressed files are read as well."""

import errno
import gzip
import json
import os
import tempfile
import zlib
from functools import partial
from pathlib import Path
from typing import Any

from baechi_ext.errors import FileError

SCHEMA_VERSION = 1
_GZIP = b"\x1f\x8b"
"""How a compressed file begins; JSON never does."""


def read_json(path: str | Path, kind: str) -> dict[str, Any]:
    """The object in a JSON file, compressed by gzip or not; `kind` ("graph", "plan", ...) names it in messages.

    Raises FileError where the file is missing, truncated, not JSON, not an object, or of a newer schema. Numbers are not
    looked at: who reads a field refuses NaN there, and can say whose it is.
    """
    try:
        content = Path(path).read_bytes()
        text = (gzip.decompress(content) if content.startswith(_GZIP) else content).decode()
    except (EOFError, zlib.error, gzip.BadGzipFile) as e:
        raise FileError(f"{kind} file {str(path)!r} is damaged: {e}; write it again") from e
    except OSError as e:
        raise FileError(f"cannot read {kind} file {str(path)!r}: {e.strerror}; check the path") from e
    except UnicodeDecodeError as e:
        raise FileError(f"{kind} file {str(path)!r} is not UTF-8 text (byte {e.start}); expected JSON") from e
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise FileError(f"{kind} file {str(path)!r} is not valid JSON: {e}; it may be truncated: write it again") from e
    if not isinstance(value, dict):
        raise FileError(f"{kind} file {str(path)!r} holds a JSON {type(value).__name__}, expected an object")
    version = value.get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        raise FileError(f"{kind} file {str(path)!r} has schema_version {version!r}; this program reads {SCHEMA_VERSION}")
    return value


def _encode(value: dict[str, Any], compact: bool) -> bytes:
    text = _in_lines if compact else partial(json.dumps, indent=1, allow_nan=False)
    try:
        return (text(value, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:  # half a surrogate pair, as JSON allows in an escape, has no UTF-8 form: write it escaped again
        return (text(value, ensure_ascii=True) + "\n").encode()


def _in_lines(value: dict[str, Any], *, ensure_ascii: bool) -> str:
    """A line for each field, and for each member of a field that is a list."""
    one_line = partial(json.dumps, separators=(",", ":"), allow_nan=False, ensure_ascii=ensure_ascii)
    fields = []
    for key, field in value.items():
        text = "[\n" + ",\n".join(map(one_line, field)) + "\n]" if isinstance(field, list) and field else one_line(field)
        fields.append(f"{one_line(key)}:{text}")
    return "{" + ",\n".join(fields) + "}"


def write_json(path: str | Path, value: dict[str, Any], *, compact: bool = False) -> None:
    """Writes `value` beside `path` and renames it into place, so that a reader never sees half a file.

    `compact`: without indentation, for files that are kept in numbers. Raises FileError where the folder is missing or not
    writable; nothing is left behind then. A file whose name ends in .gz is compressed, and is the same for the same value.
    """
    content = _encode(value, compact)
    write_bytes(path, gzip.compress(content, mtime=0) if Path(path).suffix == ".gz" else content)


def write_bytes(path: str | Path, content: bytes) -> None:
    """The same for bytes."""
    temporary = None
    try:
        if _is_special(path):
            Path(path).write_bytes(content)
            return
        target = Path(os.path.realpath(path))
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:100]}.", suffix=".tmp")
        with os.fdopen(handle, "wb") as f:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException as e:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
        if isinstance(e, OSError):
            raise _cannot_write(path, e.strerror) from e
        raise


def require_writable(path: str | Path) -> None:
    """For before a long computation: raises the FileError that `write_json` would raise for this path, where it can tell."""
    folder = Path(os.path.realpath(path)).parent
    if Path(path).is_dir():
        raise _cannot_write(path, os.strerror(errno.EISDIR))
    if not _is_special(path) and not folder.is_dir():
        raise _cannot_write(path, os.strerror(errno.ENOENT))
    if not os.access(path if _is_special(path) else folder, os.W_OK):
        raise _cannot_write(path, os.strerror(errno.EACCES))


def make_folder(folder: Path) -> None:
    """For before a long computation: the folder, made if need be. Raises FileError where files can't be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise FileError(f"cannot make the folder {str(folder)!r}: {e.strerror}; choose another --out") from e
    require_writable(folder / "file")


def _is_special(path: str | Path) -> bool:
    """A pipe or a device can be written to, but not replaced; of a folder the system says itself that it is one."""
    return os.path.exists(path) and not os.path.isfile(path)


def _cannot_write(path: str | Path, why: str) -> FileError:
    return FileError(f"cannot write {str(path)!r}: {why}; choose a file in a folder that exists and is writable")
