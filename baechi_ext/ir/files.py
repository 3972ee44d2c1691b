"""Reading and writing the project's JSON files: strict on the way in, atomic on the way out. Compressed files are read as well.

All that is read goes through `read_bytes`, which bounds it: in bytes, counted after decompression, and in time, where a pipe is waited for.
"""

import csv
import errno
import gzip
import io
import json
import os
import secrets
import select
import shutil
import stat
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from baechi_ext.errors import FileError

SCHEMA_VERSION = 1
_TEXT = "utf-8-sig"
"""UTF-8, after the byte order mark that some editors begin files with."""
_GZIP = b"\x1f\x8b"  # the first bytes of a compressed file; JSON never begins with them
MOST_BYTES = 1 << 30
"""A file may hold so many bytes, decompressed, unless `$BAECHI_READ_LIMIT` says another number."""
READ_LIMIT = "BAECHI_READ_LIMIT"
_BYTES_A_VALUE = 32
"""JSON may hold a value for each so many bytes that a file may hold."""
PIPE_SECONDS = 60
"""A pipe may take so long to give all that it has to give, unless `$BAECHI_READ_SECONDS` says another number."""
READ_SECONDS = "BAECHI_READ_SECONDS"
MOST_LEVELS = 64
"""Lists and objects in each other; no file of ours has more than ten."""
_CHUNK = 1 << 20
_ROW = 1 << 9  # more than most rows of a table take
_NAME_BYTES = 100
"""Bytes of a file's name in that of the one beside it: names have 255."""
_TEMPORARY = "baechi_tmp_"
_LEFT_SECONDS = 24 * 3600
_DEFLATE_RATIO = 1032  # a byte of a compressed file becomes so many at most
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def read_bytes(path: str | Path, kind: str, most_bytes: int | None = None) -> bytes:
    """The content of a file or pipe, decompressed where gzip compressed it; `kind` ("graph", "plan", ...) names it in messages.

    Raises FileError where it is missing, a device, damaged, or of more than `most_bytes` (default: `$BAECHI_READ_LIMIT`, else MOST_BYTES),
    or a pipe is not written in time.
    """
    named = f"{kind} file {str(path)!r}"
    limit = _allowed(READ_LIMIT, MOST_BYTES, "bytes", 18) if most_bytes is None else most_bytes
    try:
        content = _joined(_chunks(path, named), limit, named)
        if not content.startswith(_GZIP):
            return content
        if len(content) * _DEFLATE_RATIO > limit:  # counted before any of it is kept
            _require_size(sum(map(len, _decompressed(content, limit))), limit, named)
        return _joined(_decompressed(content, limit), limit, named)
    except (EOFError, zlib.error, gzip.BadGzipFile) as e:
        raise FileError(f"{named} is damaged: {e}; write it again") from e
    except (OSError, ValueError) as e:  # a name with a null byte is a ValueError
        raise _cannot_read(named, e) from e
    except MemoryError as e:
        raise FileError(f"{named} does not fit into memory; give a smaller one") from e


def _cannot_read(named: str, error: OSError | ValueError) -> FileError:
    return FileError(f"cannot read {named}: {getattr(error, 'strerror', None) or error}; check the path")


def read_text(path: str | Path, kind: str, most_bytes: int | None = None) -> str:
    """The same as text. Raises FileError, too, for what is not UTF-8."""
    try:
        return read_bytes(path, kind, most_bytes).decode(_TEXT)
    except UnicodeDecodeError as e:
        raise FileError(f"{kind} file {str(path)!r} is not UTF-8 text (byte {e.start}); expected text") from e


def _allowed(variable: str, default: int, unit: str, digits: int) -> int:
    """The limit that an environment variable sets, of so many digits at most."""
    text = os.environ.get(variable)
    if not text:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) <= digits):
        raise FileError(f"${variable} is {text!r}; expected a whole number of {unit}")
    return int(text)


def _require_size(size: int, limit: int, named: str) -> None:
    if size > limit:
        raise FileError(f"{named} holds more than {limit} bytes; check that it is the right one, or allow more by ${READ_LIMIT} (in bytes)")


def _joined(chunks: Iterator[bytes], limit: int, named: str) -> bytes:
    found = bytearray()
    for chunk in chunks:
        found += chunk
        _require_size(len(found), limit, named)
    return bytes(found)


def _decompressed(content: bytes, limit: int) -> Iterator[bytes]:
    """Pieces of what a compressed file holds, until there are more than `limit` bytes."""
    size = 0
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
        while size <= limit and (chunk := file.read(_CHUNK)):
            size += len(chunk)
            yield chunk


def _chunks(path: str | Path, named: str) -> Iterator[bytes]:
    """Pieces of a file or pipe. Opening a pipe that nobody writes to would wait for ever, but for O_NONBLOCK."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if stat.S_ISFIFO(mode):
            yield from _from_pipe(descriptor, named)
        elif stat.S_ISREG(mode):
            while chunk := os.read(descriptor, _CHUNK):
                yield chunk
        else:
            raise FileError(f"cannot read {named}: it is a device; give a file or a pipe")
    finally:
        os.close(descriptor)


def _from_pipe(descriptor: int, named: str) -> Iterator[bytes]:
    seconds = _allowed(READ_SECONDS, PIPE_SECONDS, "seconds", 6)  # a poll waits for 24 days at most
    waiting, end = select.poll(), time.monotonic() + seconds
    waiting.register(descriptor, select.POLLIN)
    while True:
        if not waiting.poll(max(0.0, end - time.monotonic()) * 1000):
            raise FileError(
                f"{named} is a pipe, of which not all was written within {seconds} s; write a file, and give that, or allow more by "
                f"${READ_SECONDS} (in seconds)"
            )
        try:
            chunk = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            continue
        if not chunk:
            return
        yield chunk


def read_json(path: str | Path, kind: str) -> dict[str, Any]:
    """The object in a JSON file, compressed by gzip or not; `kind` ("graph", "plan", ...) names it in messages.

    Raises FileError where the file is missing, truncated, not JSON, not an object, or of a newer schema. Numbers are not
    looked at: who reads a field refuses NaN there, and can say whose it is.
    """
    return parse_json(read_bytes(path, kind), path, kind)


def parse_json(content: bytes, path: str | Path, kind: str) -> dict[str, Any]:
    """The object that `read_json` finds in a file of this content."""
    _require_few_values(content, f"{kind} file {str(path)!r}")
    try:
        value = json.loads(content.decode(_TEXT))
    except UnicodeDecodeError as e:
        raise FileError(f"{kind} file {str(path)!r} is not UTF-8 text (byte {e.start}); expected JSON") from e
    except (ValueError, RecursionError) as e:
        raise FileError(f"{kind} file {str(path)!r} is not valid JSON: {e}; it may be truncated: write it again") from e
    except MemoryError as e:
        raise FileError(f"{kind} file {str(path)!r} does not fit into memory; give a smaller one") from e
    if _is_deep(content, value):
        raise FileError(f"{kind} file {str(path)!r} has lists and objects in each other, more than {MOST_LEVELS} deep; write it again")
    if not isinstance(value, dict):
        raise FileError(f"{kind} file {str(path)!r} holds a JSON {type(value).__name__}, expected an object")
    version = value.get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        raise FileError(f"{kind} file {str(path)!r} has schema_version {version!r}; this program reads {SCHEMA_VERSION}")
    return value


def _require_few_values(content: bytes, named: str) -> None:
    """Raises FileError for more values than memory has room for: a value takes up to a hundred bytes there, and three in a file."""
    most = _allowed(READ_LIMIT, MOST_BYTES, "bytes", 18) // _BYTES_A_VALUE
    if len(content) > most and sum(map(content.count, (b",", b"[", b"{"))) > most:
        raise FileError(
            f"{named} holds more than {most} values; check that it is the right one, or allow more by ${READ_LIMIT} (in bytes, "
            f"{_BYTES_A_VALUE} for each)"
        )


def _is_deep(content: bytes, value: object) -> bool:
    """True if a file nests deeper than MOST_LEVELS: what compares, copies or shows its parts would run out of stack."""
    brackets = content.translate(None, _NO_BRACKETS)
    for _ in range(MOST_LEVELS):  # each time the innermost go; those in strings stay, perhaps: then the value is looked through
        if not brackets:
            return False
        brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
    level = [value]
    for _ in range(MOST_LEVELS):
        inside = [child for x in level for child in (x.values() if isinstance(x, dict) else x if isinstance(x, list) else ())]
        level = [child for child in inside if isinstance(child, dict | list)]
    return bool(level)


def encode_json(value: dict[str, Any], *, compact: bool = False) -> bytes:
    """The content of the file that `write_json` writes."""
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


def write_json(path: str | Path, value: dict[str, Any], *, compact: bool = False, durable: bool = True) -> None:
    """Writes `value` beside `path` and renames it into place, so that a reader never sees half a file.

    `compact`: without indentation, for files that are kept in numbers. `durable`: it waits for the disk, which takes seconds while others
    write much, so that the file outlives a power cut, too. Raises FileError where the folder is missing or not writable; nothing is left
    behind then. A file whose name ends in .gz is compressed, and is the same for the same value.
    """
    content = encode_json(value, compact=compact)
    write_bytes(path, gzip.compress(content, mtime=0) if Path(path).suffix == ".gz" else content, durable=durable)


def write_bytes(path: str | Path, content: bytes, *, durable: bool = True) -> None:
    """The same for bytes."""
    temporary = None
    try:
        if _is_special(path):
            Path(path).write_bytes(content)
            return
        target = Path(os.path.realpath(path))
        temporary = target.parent / f".{os.fsdecode(os.fsencode(target.name)[:_NAME_BYTES])}.{secrets.token_hex(4)}.tmp"
        with open(temporary, "xb") as f:
            f.write(content)
            if durable:
                f.flush()
                os.fsync(f.fileno())
        with suppress(OSError):  # there is none; or the file system, as of USB sticks, has no modes
            os.chmod(temporary, stat.S_IMODE(os.stat(target).st_mode))
        os.replace(temporary, target)
    except BaseException as e:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
        if isinstance(e, OSError):
            raise _cannot_write(path, e.strerror or str(e)) from e
        raise


def write_text(path: str | Path, text: str) -> None:
    """The same for text, in UTF-8."""
    write_bytes(path, encode_text(text))


def encode_text(text: str) -> bytes:
    """The text in UTF-8; half a surrogate pair, of JSON's escapes or of a file's name in another encoding, is written as an escape."""
    return text.encode(errors="backslashreplace")


def append_csv(path: str | Path, names: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Appends rows to a CSV file, at once, after a line of names where there is none. A last row that was cut off while it was written is
    removed. Raises FileError."""
    text = io.StringIO()
    try:
        with open(path, "a+b") as file:
            file.truncate(end := _end_of_lines(file))
            csv.writer(text, lineterminator="\n").writerows(rows if end else [names, *rows])
            file.write(encode_text(text.getvalue()))
    except OSError as e:
        raise _cannot_write(path, e.strerror or str(e)) from e


def _end_of_lines(file: BinaryIO) -> int:
    """The position behind the last whole line."""
    end = file.seek(0, os.SEEK_END)
    while end:
        begin = max(0, end - _ROW)
        file.seek(begin)
        if (found := file.read(end - begin).rfind(b"\n")) >= 0:
            return begin + found + 1
        end = begin
    return 0


def require_there(path: str | Path, kind: str) -> None:
    """Raises the FileError that `read_bytes` would raise where there is no such file, before anything else is looked at."""
    try:
        os.stat(path)
    except (OSError, ValueError) as e:
        raise _cannot_read(f"{kind} file {str(path)!r}", e) from e


def require_writable(path: str | Path) -> None:
    """Raises, before a long computation, the FileError that `write_json` would raise for this path, where it can tell."""
    folder = Path(os.path.realpath(path)).parent
    if Path(path).is_dir():
        raise _cannot_write(path, os.strerror(errno.EISDIR))
    if not _is_special(path) and not folder.is_dir():
        raise _cannot_write(path, os.strerror(errno.ENOENT))
    if not os.access(path if _is_special(path) else folder, os.W_OK):
        raise _cannot_write(path, os.strerror(errno.EACCES))


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder for files that only the body needs. Those of this user that killed processes left long before are removed."""
    with tempfile.TemporaryDirectory(prefix=_TEMPORARY) as name:
        here = os.stat(name)
        for left in Path(name).parent.glob(f"{_TEMPORARY}????????"):
            with suppress(OSError):
                found = left.lstat()
                if found.st_uid == here.st_uid and found.st_mtime < here.st_mtime - _LEFT_SECONDS:
                    shutil.rmtree(left, ignore_errors=True)
        yield Path(name)


def make_folder(folder: Path) -> None:
    """Returns the folder, made if need be, before a long computation. Raises FileError where files can't be written there."""
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
