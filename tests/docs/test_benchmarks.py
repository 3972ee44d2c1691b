"""The benchmarks that pages and results name exist, and have the flags they are named with: as each says itself."""

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
    (where, word.removeprefix("benchmarks."), words[i + 1 :])
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


@pytest.mark.parametrize(("where", "name", "words"), NAMED, ids=[f"{where}-{name}-{i}" for i, (where, name, _) in enumerate(NAMED)])
def test_benchmarks_and_their_flags_exist(where: str, name: str, words: list[str]) -> None:
    assert (ROOT / "benchmarks" / f"{name}.py").exists() or (ROOT / "benchmarks" / name / "__main__.py").exists()
    own = takewhile(lambda word: word != "--", words)  # what follows is for another command
    assert {word.partition("=")[0] for word in own if word.startswith("--")} <= flags_of(name), where


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("*.py")), ids=lambda path: path.stem)
def test_every_benchmark_can_be_imported(path: Path) -> None:
    import_module(f"benchmarks.{path.stem}")


def test_benchmarks_are_named() -> None:
    assert len({name for _, name, _ in NAMED}) >= 10
