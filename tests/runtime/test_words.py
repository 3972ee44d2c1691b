"""The words of workers on stderr, however they are cut into pieces."""

import os
from typing import IO

import pytest

from baechi_runtime.torch.processes.words import Words

MARK = "<abc> "


def opened(descriptor: int) -> IO[bytes]:
    return os.fdopen(descriptor, "rb")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_error_lines_are_found_wherever_they_begin(capsys: pytest.CaptureFixture[str], size: int) -> None:
    said = f"10%\r20%\r{MARK}error: the cause\nnext < <ab <abd\n<abcaf\xe9{MARK}error: cut off".encode()
    reading, writing = os.pipe()
    words = Words(opened(reading), MARK, shown=True)
    for begin in range(0, len(said), size):
        os.write(writing, said[begin : begin + size])
    os.close(writing)
    assert words.errors == ["the cause", "cut off"]
    assert words.ending == ["10%", "20%", "next < <ab <abd", "<abcaf\xe9"]
    assert capsys.readouterr().err == "10%\r20%\rnext < <ab <abd\n<abcaf\xe9\n"


def test_what_has_no_line_end_yet_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    reading, writing = os.pipe()
    with open(writing, "wb", buffering=0) as pipe:
        words = Words(opened(reading), MARK, shown=True)
        pipe.write(b"half a line")
        seen = ""
        while "line" not in seen:
            seen += capfd.readouterr().err
    words.wait()
    assert seen == "half a line"


def test_the_last_lines_of_other_workers_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    reading, writing = os.pipe()
    words = Words(opened(reading), MARK, shown=False)
    os.write(writing, "".join(f"line {i}\n" for i in range(100)).encode())
    os.close(writing)
    assert words.ending == [f"line {i}" for i in range(70, 100)]
    assert capsys.readouterr().err == ""
