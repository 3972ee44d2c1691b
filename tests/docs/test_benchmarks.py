"""The benchmarks that pages and results name exist, or did at the commit named, and have the flags they are named with."""

import contextlib
import io
import json
import re
import shlex
from functools import cache
from importlib import import_module
from itertools import takewhile
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, ROOT

RECORDED = [(path, json.loads(path.read_text(encoding="utf-8"))) for path in sorted((ROOT / "benchmarks" / "results").rglob("*.json"))]
COMMANDS = [(path.name, shlex.split(found["command"])) for path, found in RECORDED if isinstance(found.get("command"), str)]
COMMANDS += [(page.name, words) for page in PAGES for words in page.commands()]
NAMED = [
    (where, word.removeprefix("benchmarks."), words[i + 1 :], words[:2] == ["git", "checkout"])
    for where, words in COMMANDS
    for i, word in enumerate(words)
    if i and words[i - 1] == "-m" and word.startswith("benchmarks.")
]


@cache
def flags_of(name: str) -> set[str]:
    """The flags in the benchmark's own help."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit, match="0"):
        folder = (ROOT / "benchmarks" / name).is_dir()
        import_module(f"benchmarks.{name}.__main__" if folder else f"benchmarks.{name}").main(["--help"])
    return set(re.findall(r"--[a-z]\w*", printed.getvalue()))


@pytest.mark.parametrize(("where", "name", "words", "retired"), NAMED, ids=[f"{named[0]}-{named[1]}-{i}" for i, named in enumerate(NAMED)])
def test_benchmarks_and_their_flags_exist(where: str, name: str, words: list[str], retired: bool) -> None:
    """A command that begins with `git checkout` has a script of that commit, which is here no more."""
    exists = (ROOT / "benchmarks" / f"{name}.py").exists() or (ROOT / "benchmarks" / name / "__main__.py").exists()
    assert exists != retired
    if exists:
        own = takewhile(lambda word: word != "--", words)  # what follows is for another command
        assert {word.partition("=")[0] for word in own if word.startswith("--")} <= flags_of(name), where


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.stem)
def test_every_benchmark_can_be_imported(path: Path) -> None:
    import_module(f"benchmarks.{path.stem}")


def test_benchmarks_are_named() -> None:
    assert len({name for _, name, _, retired in NAMED if not retired}) >= 10
