"""docs/tutorial.md does what it says: its blocks run in order in one folder, and print what stands below them, numbers apart.

A Python block that begins with a comment `# NAME.py` is saved under that name; others are run. Of a text block every line has to come, in
this order, in what the block above it printed; it may go on longer, and other lines may come between.
"""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, Block, Page
from tests.runtime.forked_programs import forked_programs

PAGE = Page(ROOT / "docs" / "tutorial.md")
SEARCH = "baechi place run/graph.json --num_devices=4 "
"""Who reads the page waits ten seconds for this search of all cores; the test gives it one."""
STEPS, TRAIN = "default=400", "baechi train "
"""Who reads the page trains for a while and lets the faster of placed and plain steps win; on a machine that runs tests that may be either,
so there a few steps stay placed, and what was measured of plain ones is left out."""
MEASURED = re.compile(r"\S+ times as fast: |, \S+ \S+ as it is(?=; )|, placing saves .*")
_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?: ?(?:us|ms|s|B|KiB|MiB|GiB|%)\b)?")


def shape(line: str) -> str:
    """The part of a line that is the same on every machine: words, with runs of spaces as one."""
    return re.sub(r"\s+", " ", _NUMBER.sub("#", line)).strip()


def missing(expected: str, printed: str) -> list[str]:
    """The expected lines that do not come in their turn."""
    lines = iter([shape(line) for line in printed.splitlines()])
    wanted = [(line, shape(MEASURED.sub("", line))) for line in expected.splitlines()]
    return [line for line, begin in wanted if not any(found.startswith(begin) for found in lines)]


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """`python` and `baechi` are those of this checkout; one thread, for sums in one order."""
    with forked_programs(tmp_path / "bin") as programs:
        yield {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}


def shortened(commands: str) -> str:
    return commands.replace(SEARCH, f"{SEARCH}--time_limit=1 ").replace(TRAIN, f"{TRAIN}--keep_placed ")


def run(block: Block, folder: Path, environment: dict[str, str]) -> str:
    """The block's output, errors included, in the order of time."""
    if block.language == "python":
        (folder / "block.py").write_text(block.text)
    commands = "python block.py" if block.language == "python" else shortened(block.text)
    command = ["bash", "-euo", "pipefail", "-c", commands]
    done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, f"{block.text}\n{done.stdout}"
    return done.stdout


def test_the_tutorial(tmp_path: Path, environment: dict[str, str]) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    printed, compared = "", 0
    assert sum(SEARCH in block.text for block in PAGE.fenced) == 1
    for block in PAGE.fenced:
        saved = re.match(r"# (\w+\.py)\n", block.text)
        if block.language == "text":
            assert missing(block.text, printed) == [], printed
            compared += 1
        elif block.language == "python" and saved:
            assert STEPS in block.text
            (folder / saved[1]).write_text(block.text.replace(STEPS, "default=8"))
        else:
            assert block.language in ("python", "sh")
            printed = run(block, folder, environment)
    assert compared >= 6


def test_what_would_be_missed() -> None:
    assert missing("step  6.9 ms\nnone", "x\nstep 7 s (more)\ny\nnone\n") == []
    assert missing("none\nstep 6.9 ms", "step 7 s\nnone") == ["step 6.9 ms"]
    assert missing("a 1 of b", "a 2 of c") == ["a 1 of b"]
