"""Edits of files: bytes that flip, go or come, and values of JSON that are of another type, too large, too deep, missing or doubled."""

import gzip
import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from hypothesis import strategies as st

Content = bytes
_DOUBLED = "\0doubled"
"""Stands for a second key of the same name until the text is made."""
_DEEP = "\0deep"
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 0.5, -0.0, 1e-320, 2**31, 2**63, 2**64, -(2**63), 10**30, 10**400, 10**4299),
    *(float("nan"), float("inf"), -float("inf"), 1e308, 1.5),
    *("", "a", "0", "1", "nan", "x" * 300, "y" * 100_000, "1" * 5000, "\0", "\x1b[31mred", "\u202e", "\ud800", "a\nb", "..", "../x"),
    *("/dev/zero", "%s{0}", "*", "[", "[a-"),
    *([], {}, [None], [[]], [1, "a"], {"a": None}, {"id": 1}, [{}], [0] * 3000, {"": ""}),
    _DEEP,
)
"""Values that no reader expects where they come."""
Edit = tuple[str, int, int]
"""The kind of edit, where in the file it is made, and which of the kind."""


def edits(kinds: tuple[str, ...]) -> st.SearchStrategy[list[Edit]]:
    """A few edits of these kinds, one after the other."""
    return st.lists(st.tuples(st.sampled_from(kinds), st.integers(0, 2**20), st.integers(0, 2**16)), min_size=1, max_size=3)


def edited(content: Content, changes: list[Edit]) -> Content:
    """The content after these edits; one that does not fit changes nothing."""
    for kind, where, which in changes:
        content = KINDS[kind](content, where, which)
    return content


def _flipped(content: Content, where: int, which: int) -> Content:
    at = where % max(1, len(content))
    return content[:at] + bytes(byte ^ (1 + which % 255) for byte in content[at : at + 1]) + content[at + 1 :]


def _cut(content: Content, where: int, which: int) -> Content:
    at = where % max(1, len(content))
    return content[:at] if which % 2 else content[:at] + content[at + 1 + which % 64 :]


def _inserted(content: Content, where: int, which: int) -> Content:
    at = where % (len(content) + 1)
    return content[:at] + Random(which).choice(PIECES) + content[at:]


PIECES = (
    *(b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\x1f\x8b\x08\x00", b"{", b"}", b"[" * 70, b"[" * 30_000, b'"', b"\\"),
    *(b",", b"\n", b"\x1b[2J", b"\\ud800", b"0", b"-", b"null", b"#", b": ", b"*a", b"&a ", b"!!int ''", b"0x" + b"f" * 4000),
    *(b"NaN", b"-Infinity", b"1e999", b"9" * 5000),
)


def _doubled(content: Content, where: int, which: int) -> Content:
    at = where % max(1, len(content))
    piece = content[at : at + 1 + which % 200]
    return content[:at] + piece + content[at:]


def _compressed(content: Content, where: int, which: int) -> Content:
    packed = gzip.compress(content, 1, mtime=0)
    return packed if which % 4 == 0 else _cut(packed, where, which) if which % 4 == 1 else _flipped(packed, where, which)


def _json(change: Callable[[Any, Any, int], None]) -> Callable[[Content, int, int], Content]:
    """The edit that changes a member of a list or an object."""

    def edit(content: Content, where: int, which: int) -> Content:
        length = int.from_bytes(content[:8], "little")
        if content[8:9] == b"{" and length < len(content):  # safetensors: its header is JSON
            header = edit(content[8 : 8 + length], where, which)
            return len(header).to_bytes(8, "little") + header + content[8 + length :]
        try:
            value = json.loads(content)
        except (ValueError, RecursionError):
            return content
        members = list(_members(value))
        if not members:
            return content
        change(*members[where % len(members)], which)
        return _text(value)

    return edit


def _members(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every list or object with each of its keys, those at the top first."""
    level = [value]
    while level:
        pairs = [(x, key) for x in level for key in (x if isinstance(x, dict) else range(len(x)))]
        yield from pairs
        level = [x[key] for x, key in pairs if isinstance(x[key], dict | list)]


def _text(value: Any) -> Content:
    text = json.dumps(value).replace(json.dumps(_DOUBLED)[1:-1], "").replace(json.dumps(_DEEP), "[" * 500 + "]" * 500)
    return text.encode()


def _replace(x: Any, key: Any, which: int) -> None:
    x[key] = VALUES[which % len(VALUES)]


def _drop(x: Any, key: Any, _: int) -> None:
    del x[key]


def _rename(x: Any, key: Any, which: int) -> None:
    if isinstance(x, dict):
        texts = [value for value in VALUES if isinstance(value, str) and value != _DEEP]
        x[texts[which % len(texts)]] = x.pop(key)


def _repeat(x: Any, key: Any, which: int) -> None:
    if isinstance(x, dict):
        x[f"{key}{_DOUBLED}"] = VALUES[which % len(VALUES)]
    else:
        x.insert(which % (len(x) + 1), x[key])


def _swap(x: Any, key: Any, which: int) -> None:
    other = list(x if isinstance(x, dict) else range(len(x)))[which % len(x)]
    x[key], x[other] = x[other], x[key]


BYTES: dict[str, Callable[[Content, int, int], Content]] = {
    "flip": _flipped, "cut": _cut, "insert": _inserted, "double": _doubled, "gzip": _compressed,
}  # fmt: skip
KINDS = BYTES | {name: _json(change) for name, change in (
    ("replace", _replace), ("drop", _drop), ("rename", _rename), ("repeat", _repeat), ("swap", _swap),
)}  # fmt: skip
TEXT_KINDS = tuple(BYTES)
JSON_KINDS = (*BYTES, *(name for name in KINDS if name not in BYTES for _ in range(3)))
"""Edits of JSON are drawn most often: few others come past the parser."""
