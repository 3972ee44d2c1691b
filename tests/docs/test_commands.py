"""Everything that the pages tell people to type exists: commands, flags, make targets, links. Benchmarks: test_benchmarks.py."""

import argparse
import re
from functools import cache

import pytest

from baechi_runtime.cli.main import make_parser, with_underscores
from tests.docs import flags_page, report_schema
from tests.docs.pages import PAGES, ROOT, Page

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
PROGRAMS = {"./bazel-bin/train": ["train"], "./bazel-bin/communication_benchmark": ["probe-links"]}
"""Other names of sub-commands."""
OTHERS = {
    "--help", "--version",
    "--nnodes", "--node-rank", "--nproc-per-node", "--master-addr", "--master-port", "--max-restarts",  # torchrun's
    "--cpu-list",  # taskset's
    "--compact",  # json.tool's
    "--epochs",  # a script's
    "--exponent", "--nocostgen",  # what Baechi calls another one, and how TensorFlow spells a switch
    "--cases",  # a benchmark's
    "--build-arg", "--shm-size",  # docker's
}  # fmt: skip
"""Flags of other programs."""
ELSEWHERE = ("pip", "bazel", "docker", "apt-get", "git", "pytest")
"""Programs whose flags are their own affair."""


def parsers_of(parser: argparse.ArgumentParser, name: tuple[str, ...] = ()) -> dict[tuple[str, ...], argparse.ArgumentParser]:
    """All sub-commands, and theirs, by their words."""
    found = {name: parser}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, sub in action.choices.items():
                found |= parsers_of(sub, (*name, word))
    return found


PARSERS = parsers_of(make_parser())
FLAGS = {option for parser in PARSERS.values() for action in parser._actions for option in action.option_strings}


def of_baechi(words: list[str]) -> list[str] | None:
    """The arguments of `baechi`, where the words call it by any of its names; what follows a redirection or a pipe is left out."""
    words = words[: next((i for i, word in enumerate(words) if word in ("|", ">", "2>", "&&")), len(words))]
    for i, word in enumerate(words):
        if word in PROGRAMS:
            return PROGRAMS[word] + words[i + 1 :]
        if word == "baechi_ext" and words[max(0, i - 1)] == "-m":
            return words[i + 1 :]
        if word in ("baechi", ".venv/bin/baechi") and (i == 0 or words[0] in ("nice", "time", "taskset")):
            return words[i + 1 :]
    return None


def command_of(arguments: list[str]) -> tuple[str, ...]:
    """The longest row of words that names a sub-command."""
    name: tuple[str, ...] = ()
    for word in arguments:
        if (*name, word) not in PARSERS:
            break
        name = (*name, word)
    return name


@each_page
def test_commands_and_their_flags_exist(page: Page) -> None:
    for words in page.commands():
        arguments = of_baechi(words)
        if not arguments or not re.fullmatch(r"[a-z][a-z-]*|--\w+", arguments[0]):
            continue  # a file's name, or the word COMMAND
        name = command_of(arguments)
        assert name or arguments[0] in ("--help", "--version", "--completion"), f"{page.name}: baechi {' '.join(arguments)}"
        known = {option for action in PARSERS[name]._actions for option in action.option_strings}
        end = arguments.index("--") if "--" in arguments else len(arguments)
        used = {word.partition("=")[0] for word in with_underscores(arguments)[:end] if word.startswith("-")}
        assert used <= known, f"{page.name}: baechi {' '.join(arguments)}"


@each_page
def test_flags_that_are_mentioned_exist(page: Page) -> None:
    for words in page.commands():
        if words[0] in ELSEWHERE or any(word.startswith("benchmarks.") for word in words):
            continue
        own = words[: words.index("--")] if "--" in words else words  # what follows are a script's
        used = {word.partition("=")[0] for word in own if re.match(r"--\w", word)}
        assert used <= FLAGS | OTHERS, f"{page.name}: {' '.join(words)}"


@each_page
def test_make_targets_exist(page: Page) -> None:
    targets = make_targets()
    for words in page.commands():
        if words[0] == "make":
            assert {word for word in words[1:] if re.fullmatch(r"[a-z./-]+", word)} <= targets, f"{page.name}: {' '.join(words)}"


@cache
def make_targets() -> set[str]:
    """The Makefile's targets; the stamp by the name of its file."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    stamp = re.search(r"^STAMP := (.*)$", text, re.MULTILINE)
    return {*re.findall(r"^([a-z][\w-]*):(?!=)", text, re.MULTILINE), stamp[1] if stamp else ""}


@each_page
def test_links_lead_somewhere(page: Page) -> None:
    anchors = {other.path: other.anchors for other in PAGES}
    for link in page.links():
        if link.startswith(("http://", "https://")):
            continue
        file, _, anchor = link.partition("#")
        target = (page.path.parent / file).resolve() if file else page.path
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors[target], f"{page.name}: {link}"


def test_the_page_of_flags_is_the_parsers() -> None:
    written = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8")
    assert written == flags_page.rendered(), "python -m tests.docs.flags_page > docs/flags.md"


def test_the_schema_is_the_declarations() -> None:
    written = (ROOT / "docs" / "report.schema.json").read_text(encoding="utf-8")
    assert written == report_schema.rendered(), "python -m tests.docs.report_schema > docs/report.schema.json"


def test_the_readme_can_be_read_at_one_go() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 1300


def test_every_page_is_in_the_index() -> None:
    index = next(page for page in PAGES if page.name == "docs/index.md")
    listed = {link.partition("#")[0] for link in index.links()}
    assert {page.path.name for page in PAGES if page.path.parent == ROOT / "docs"} - {"index.md"} <= listed


# What these tests would see


def page_of(text: str) -> Page:
    page = Page(ROOT / "docs" / "nowhere.md")
    page.__dict__["text"] = text
    return page


@pytest.mark.parametrize(
    "text",
    [
        "    baechi plce GRAPH.json",
        "```sh\nbaechi place G.json \\\n    --number_of_devices=2\n```",
        "say `baechi train --explain`",
        "    torchrun -m baechi_ext train --mod=x",
        "    ./bazel-bin/train --gpus=4",
    ],
)
def test_what_does_not_exist_is_found(text: str) -> None:
    with pytest.raises(AssertionError):
        test_commands_and_their_flags_exist(page_of(text))


def test_what_exists_is_not() -> None:
    page = page_of("    baechi train --num-devices=2 my.py -- --anything  # why\n    baechi placeto study cifar10 --orders=bfs\n")
    assert [command_of(of_baechi(words)) for words in page.commands()] == [("train",), ("placeto", "study")]
    test_commands_and_their_flags_exist(page)
