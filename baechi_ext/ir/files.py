"""Reading and writing the project's JSON files: strict on the way in, atomic on the way out."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from baechi_ext.errors import FileError

SCHEMA_VERSION = 1


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def read_json(path: str | Path, kind: str) -> dict[str, Any]:
    """The object in a JSON file; `kind` ("graph", "plan", ...) names it in messages.

    Raises FileError where the file is missing, truncated, not JSON, not an object, or of a newer schema. NaN and
    infinities are refused: every number in these files is finite.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as e:
        raise FileError(f"cannot read {kind} file {str(path)!r}: {e.strerror}; check the path") from e
    except UnicodeDecodeError as e:
        raise FileError(f"{kind} file {str(path)!r} is not UTF-8 text (byte {e.start}); expected JSON") from e
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as e:
        raise FileError(f"{kind} file {str(path)!r} is not valid JSON: {e}; it may be truncated: write it again") from e
    if not isinstance(value, dict):
        raise FileError(f"{kind} file {str(path)!r} holds a JSON {type(value).__name__}, expected an object")
    version = value.get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        raise FileError(f"{kind} file {str(path)!r} has schema_version {version!r}; this program reads {SCHEMA_VERSION}")
    return value


def write_json(path: str | Path, value: dict[str, Any]) -> None:
    """Writes `value` beside `path` and renames it into place, so that a reader never sees half a file.

    Raises FileError where the folder is missing or not writable; nothing is left behind then.
    """
    path = Path(path)
    text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        with os.fdopen(handle, "w", encoding="utf-8") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException as e:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
        if isinstance(e, OSError):
            raise FileError(f"cannot write {str(path)!r}: {e.strerror}; choose a folder that exists and is writable") from e
        raise
