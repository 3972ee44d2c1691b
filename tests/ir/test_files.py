"""JSON files: strict on the way in, whole or not there on the way out."""

import errno
import gzip
import json
import os
import re
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baechi_ext.errors import FileError
from baechi_ext.ir import Op, OpGraph
from baechi_ext.ir.files import (
    READ_LIMIT,
    READ_SECONDS,
    append_csv,
    read_json,
    read_text,
    require_writable,
    temporary_folder,
    write_json,
    write_text,
)

UNREADABLE = [
    (b"", "is not valid JSON: .*; it may be truncated: write it again"),
    (b'{"nodes": [', "is not valid JSON: .*; it may be truncated"),
    (b"not json", "is not valid JSON"),
    (b'{"a": 1' + b"0" * 5000 + b"}", "is not valid JSON"),
    (b"[" * 100_000, "is not valid JSON"),
    (b"\xff\xfe{}", r"is not UTF-8 text \(byte 0\); expected JSON"),
    (b"[1, 2]", "holds a JSON list, expected an object"),
    (b"null", "holds a JSON NoneType, expected an object"),
    (b'{"schema_version": 2}', "has schema_version 2; this program reads 1"),
    (b'{"schema_version": "1"}', "has schema_version '1'; this program reads 1"),
    (gzip.compress(b'{"a": 1}')[:-9], "is damaged: Compressed file ended before .*; write it again"),
    (gzip.compress(b'{"a": 1}')[:-1] + b"x", "is damaged: Incorrect length of data"),
    (b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\x07", "is damaged: Error -3 while decompressing data"),
    (gzip.compress(b"[1, 2]"), "holds a JSON list, expected an object"),
]


@pytest.mark.parametrize(("content", "message"), UNREADABLE, ids=[m for _, m in UNREADABLE])
def test_what_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(FileError, match=message) as caught:
        read_json(path, "graph")
    assert str(caught.value).startswith(f"graph file {str(path)!r}")


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"a": 1}', encoding="utf-8-sig")
    assert read_json(path, "graph") == {"a": 1}
    assert read_text(path, "config") == '{"a": 1}'


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"cannot read plan file '.*no\.json': No such file or directory; check the path"):
        read_json(tmp_path / "no.json", "plan")


def test_more_bytes_than_a_file_may_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(b'{"a": "' + b"x" * 3_000_000 + b'"}')
    monkeypatch.setenv(READ_LIMIT, "3000000")
    message = r"^graph file '.*x\.json' holds more than 3000000 bytes; check that .*, or allow more by \$BAECHI_READ_LIMIT"
    with pytest.raises(FileError, match=message):
        read_json(path, "graph")
    monkeypatch.setenv(READ_LIMIT, "3000009")
    assert len(read_json(path, "graph")["a"]) == 3_000_000
    monkeypatch.setenv(READ_LIMIT, "1GB")
    with pytest.raises(FileError, match=r"\$BAECHI_READ_LIMIT is '1GB'; expected a whole number of bytes"):
        read_json(path, "graph")


def test_a_compressed_file_is_counted_decompressed_and_not_held(tmp_path: Path) -> None:
    """Three megabytes that become three gigabytes are refused in a process that may have one and a half."""
    mib = gzip.compress(b" " * (1 << 20), 9)
    (tmp_path / "x.json").write_bytes(mib * 3000)  # members follow each other
    code = f"""
import resource, sys
from baechi_ext.errors import FileError
from baechi_ext.ir.files import read_json
def peak():  # in KiB; ru_maxrss begins with what this process's parent held
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
resource.setrlimit(resource.RLIMIT_AS, (3 << 29, 3 << 29))
before = peak()
try:
    read_json({str(tmp_path / "x.json")!r}, "graph")
except FileError as e:
    print(e, peak() - before < 100_000)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    assert re.search(r"holds more than 1073741824 bytes; .* True$", done.stdout), done


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null", "/dev/random"])
def test_a_device_is_not_read(device: str) -> None:
    with pytest.raises(FileError, match=f"cannot read graph file '{device}': it is a device; give a file or a pipe"):
        read_json(device, "graph")


def test_a_pipe_that_nobody_writes_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(READ_SECONDS, "1")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileError, match=r"is a pipe, of which not all was written within 1 s; .* or allow more by \$BAECHI_READ_SECONDS"):
        read_json(tmp_path / "pipe", "graph")


def test_a_pipe_is_read(tmp_path: Path) -> None:
    pipe, value = tmp_path / "pipe", {"a": "x" * 3_000_000}
    os.mkfifo(pipe)
    code = f"import gzip, json; open({str(pipe)!r}, 'wb').write(gzip.compress(json.dumps({value!r}).encode(), 0))"
    with subprocess.Popen([sys.executable, "-c", code.replace(repr(value), "{'a': 'x' * 3_000_000}")]):
        assert read_json(pipe, "graph") == value


@pytest.mark.parametrize("name", ["x" * 300, "a\0b"])
def test_a_name_that_no_file_has(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileError, match="cannot read graph file '.*(File name too long|null (byte|character in path)); check the path"):
        read_json(tmp_path / name, "graph")


@pytest.mark.parametrize("text", ["[" * 70 + "]" * 70, '{"a":' * 64 + "1" + "}" * 64, '["' + "[" * 100 + '",' + "[" * 64 + "]" * 65])
def test_lists_and_objects_in_each_other(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(f'{{"a": {text}}}')
    with pytest.raises(FileError, match="has lists and objects in each other, more than 64 deep; write it again"):
        read_json(tmp_path / "x.json", "graph")


@pytest.mark.parametrize("value", ["[" * 100, ["}{" * 100] * 3])
def test_brackets_in_texts_do_not_count(tmp_path: Path, value: Any) -> None:
    write_json(tmp_path / "x.json", {"a": value})
    assert read_json(tmp_path / "x.json", "graph") == {"a": value}


def test_a_folder_in_place_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot read plan file .*: Is a directory"):
        read_json(tmp_path, "plan")


def test_a_file_without_schema_version_is_of_this_one(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"a": 1}')
    assert read_json(tmp_path / "x.json", "graph") == {"a": 1}


def test_more_values_than_memory_has_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thousandth of the bytes, where they are compressed."""
    path = tmp_path / "x.json.gz"
    path.write_bytes(gzip.compress(b'{"x": [' + b"[]," * 40_000 + b"1]}"))
    assert len(read_json(path, "graph")["x"]) == 40_001
    monkeypatch.setenv(READ_LIMIT, "1000000")
    with pytest.raises(FileError, match=r"holds more than 31250 values; check .* \$BAECHI_READ_LIMIT \(in bytes, 32 for each\)"):
        read_json(path, "graph")
    path.write_bytes(gzip.compress(b'{"x": "' + b"a" * 900_000 + b'"}'))
    assert len(read_json(path, "graph")["x"]) == 900_000


@pytest.mark.parametrize("value", [{"ä": "日本", "n": [1, 2.5, None, True]}, {"half": "\ud83d"}, {}])
def test_what_is_written_is_read_back(tmp_path: Path, value: dict[str, Any]) -> None:
    write_json(tmp_path / "x.json", value)
    assert read_json(tmp_path / "x.json", "graph") == value
    assert list(tmp_path.iterdir()) == [tmp_path / "x.json"]


def test_the_mode_of_a_file_is_the_users(tmp_path: Path) -> None:
    """That of the file that was there, else what the umask leaves; where the system has no modes there is none."""
    path = tmp_path / "x.json"
    for umask, mode in ((0o022, 0o644), (0o077, 0o600)):
        before = os.umask(umask)
        try:
            write_json(path, {})
        finally:
            os.umask(before)
        assert stat.S_IMODE(path.stat().st_mode) == mode
        path.unlink()
    write_json(path, {})
    path.chmod(0o664)
    write_json(path, {})
    assert stat.S_IMODE(path.stat().st_mode) == 0o664


def test_a_file_system_without_modes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "chmod", denied)
    for n in (1, 2):
        write_json(tmp_path / "x.json", {"n": n})
        assert read_json(tmp_path / "x.json", "graph") == {"n": n}


@pytest.mark.parametrize("name", ["ä" * 125, "日" * 83, "x" * 250])
def test_a_name_as_long_as_names_may_be(tmp_path: Path, name: str) -> None:
    write_json(tmp_path / f"{name}.json", {})
    assert [path.name for path in tmp_path.iterdir()] == [f"{name}.json"]


def test_compressed_by_name(tmp_path: Path) -> None:
    """The same bytes each time, whenever it is written; whoever reads need not know that it is compressed."""
    value = {"schema_version": 1, "n": list(range(100))}
    for name in ("x.json", "x.json.gz", "y.json.gz"):
        write_json(tmp_path / name, value)
    x, y = ((tmp_path / name).read_bytes() for name in ("x.json.gz", "y.json.gz"))
    assert x == y
    assert gzip.decompress(x) == (tmp_path / "x.json").read_bytes()
    (tmp_path / "unnamed").write_bytes(x)
    assert read_json(tmp_path / "x.json.gz", "graph") == read_json(tmp_path / "unnamed", "graph") == value


def test_text_is_written_as_text(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"ä": 1})
    assert "ä" in (tmp_path / "x.json").read_text(encoding="utf-8")


def test_nan_is_never_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "x.json", {"a": float("nan")})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("call", ["replace", "fsync"])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    write_json(tmp_path / "x.json", {"old": 1})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(FileError, match=r"cannot write '.*x\.json': No space left on device; choose a file in a folder"):
        write_json(tmp_path / "x.json", {"new": 2})
    assert list(tmp_path.iterdir()) == [tmp_path / "x.json"]
    assert json.loads((tmp_path / "x.json").read_text()) == {"old": 1}


def test_an_interrupt_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_json(tmp_path / "x.json", {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("write", [lambda path: write_json(path, {}), require_writable], ids=["write", "ask before"])
class TestWhereNothingCanBeWritten:
    def test_a_missing_folder(self, tmp_path: Path, write: Callable[[Path], None]) -> None:
        with pytest.raises(FileError, match="cannot write .*: No such file or directory; choose a file in a folder that exists"):
            write(tmp_path / "no" / "x.json")
        assert list(tmp_path.iterdir()) == []

    def test_a_folder_is_not_overwritten(self, tmp_path: Path, write: Callable[[Path], None]) -> None:
        with pytest.raises(FileError, match="cannot write .*: Is a directory"):
            write(tmp_path)

    def test_a_folder_without_write_permission(
        self, tmp_path: Path, write: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if os.geteuid() == 0:  # root may write everywhere: say what the system would say to others
            monkeypatch.setattr(os, "access", lambda *_: False)
            monkeypatch.setattr("builtins.open", denied)
        tmp_path.chmod(0o500)
        with pytest.raises(FileError, match="cannot write .*: Permission denied; choose a file in a folder"):
            write(tmp_path / "x.json")


def denied(*_: object, **__: object) -> None:
    raise PermissionError(errno.EACCES, "Permission denied")


def test_asking_before_leaves_nothing(tmp_path: Path) -> None:
    require_writable(tmp_path / "x.json")
    require_writable("/dev/null")
    assert list(tmp_path.iterdir()) == []


def test_a_device_is_written_to_and_not_replaced() -> None:
    write_json("/dev/null", {"a": 1})
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    require_writable(pipe)
    write_json(pipe, {"a": 1})
    assert json.loads(os.read(reader, 100)) == {"a": 1}
    os.close(reader)
    assert list(tmp_path.iterdir()) == [pipe]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "link.json").symlink_to(tmp_path / "folder" / "x.json")
    write_json(tmp_path / "link.json", {"a": 1})
    assert (tmp_path / "link.json").is_symlink()
    assert read_json(tmp_path / "folder" / "x.json", "graph") == {"a": 1}


def test_a_compact_file_says_the_same(tmp_path: Path) -> None:
    ops = [
        Op("a", "aten.mm", compute_us=1.5, persistent_bytes=8, output_bytes=4, colocation="w"),
        Op("b", phase="backward", expert=0, forward_op="a"),
    ]
    graph = OpGraph.from_edges(ops, [("a", "b", 4, ""), ("a", "b", 0, "x")], name="two")
    graph.save(tmp_path / "compact.json", compact=True)
    graph.save(tmp_path / "full.json")
    compact, full = (OpGraph.load(tmp_path / f"{name}.json") for name in ("compact", "full"))
    assert compact == full
    assert compact.ops == graph.ops
    lines = (tmp_path / "compact.json").read_text().splitlines()
    assert '{"id":"b","phase":"backward","compute_us":0.0,"expert":0,"forward_op":"a"}' in lines
    assert '{"source":"a","target":"b","bytes":4},' in lines


def test_text_that_has_no_utf_8_form_is_escaped(tmp_path: Path) -> None:
    path, table = tmp_path / "x.md", tmp_path / "x.csv"
    write_text(path, "ä \ud800\n")
    append_csv(table, ["name"], [["g\udce9.json"], ["ä"]])
    assert path.read_text() == "ä \\ud800\n"
    assert table.read_text() == "name\ng\\udce9.json\nä\n"


@pytest.mark.parametrize(("before", "after"), [("", "n,m\n3,4\n"), ("n,", "n,m\n3,4\n"), ("n,m\n1,2\n5", "n,m\n1,2\n3,4\n")])
@pytest.mark.parametrize("rest", ["", "5" * 2000])
def test_a_row_that_was_cut_off_is_replaced(tmp_path: Path, before: str, after: str, rest: str) -> None:
    path = tmp_path / "x.csv"
    path.write_text(before + rest)
    append_csv(path, ["n", "m"], [[3, 4]])
    assert path.read_text() == after


def test_what_killed_processes_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    old, new, others = (tmp_path / name for name in ("baechi_tmp_abcdefgh", "baechi_tmp_bcdefghi", "baechi_tmp_notes"))
    for folder in (old, new, others):
        folder.mkdir()
        (folder / "file").touch()
    for folder in (old, others):
        os.utime(folder, (1, 1))
    with temporary_folder() as own:
        assert set(tmp_path.iterdir()) == {new, others, own}
    assert set(tmp_path.iterdir()) == {new, others}


def test_a_compact_file_holds_any_text_and_no_nan(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"text": "\ud800 ä", "list": [1, "ä"], "none": []}, compact=True)
    assert json.loads(path.read_text()) == {"text": "\ud800 ä", "list": [1, "ä"], "none": []}
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"x": [float("nan")]}, compact=True)
