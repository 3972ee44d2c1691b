"""The project's pages: their text, code blocks and commands."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A code block; `language` is what stands behind its fence, or empty."""

    language: str
    text: str


@dataclass(frozen=True)
class Page:
    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    @property
    def fenced(self) -> list[Block]:
        return [Block(*match.groups()) for match in _FENCE.finditer(self.text)]

    @property
    def prose(self) -> str:
        """The page without its fenced and indented blocks."""
        return "\n".join(line for line in _FENCE.sub("", self.text).splitlines() if not line.startswith("    "))

    def code(self) -> Iterator[str]:
        """Every line of code: of fenced and indented blocks, with continued lines joined, and what stands between backticks."""
        indented = "\n".join(line[4:] for line in _FENCE.sub("", self.text).splitlines() if line.startswith("    "))
        for text in (indented, *(block.text for block in self.fenced)):
            yield from re.sub(r"\\\n\s*", " ", text).splitlines()
        yield from _INLINE.findall(self.prose)

    def commands(self) -> Iterator[list[str]]:
        """The words of every line of code that can be split like a shell's, without a prompt and comments."""
        for line in self.code():
            try:
                words = shlex.split(line.removeprefix("$ "), comments=True)
            except ValueError:  # no shell's: an apostrophe in a line of output
                continue
            if words:
                yield words

    def links(self) -> list[str]:
        return _LINK.findall(self.text)

    @property
    def anchors(self) -> set[str]:
        """The headings as GitHub names them in links."""
        titles = _HEADING.findall(_FENCE.sub("", self.text))
        return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


PAGES = [Page(path) for path in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")))]
