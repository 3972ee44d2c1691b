"""The property that holds for every file: its reader returns, or raises an error of ours that fits on a line, and soon."""

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import Phase, note, settings

from baechi_ext.errors import BaechiError
from tests.fuzz.formats import Format
from tests.fuzz.mutations import Edit, edited

CASES = int(os.environ.get("FUZZ_CASES", "2000"))
"""Cases of all formats together."""
FOUND = Path(__file__).parent / "found"
"""A folder for each format, of files that once ended otherwise."""
SECONDS = 20.0
"""Processor time; a reader that takes longer hangs."""
LONGEST = 2000


def share_of_cases(formats: Mapping[str, Format], total: int) -> settings:
    """The settings by which each of the formats gets its share; other cases each time where many are asked for."""
    phases = (Phase.explicit, Phase.generate, Phase.shrink)
    return settings(max_examples=max(1, total // len(formats)), derandomize=CASES <= 2000, database=None, phases=phases)


def check_edits(form: Format, changes: list[Edit]) -> None:
    """Edits the example of a format, and reads it."""
    content = form.seal(edited(form.example()[1], changes))
    note(f"{form.name}: {content[:5000]!r}")
    check(form, content)


def check(form: Format, content: bytes) -> None:
    """Reads a format's folder with this content in the file that is edited."""
    with TemporaryDirectory() as folder:
        for name, own in (form.example()[0] | {form.file: content}).items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(own)
        try:
            with _limited():
                form.read(Path(folder))
        except BaechiError as e:
            line = " ".join(str(e).split())
            assert 0 < len(line) < LONGEST, (len(line), line[:500])
            assert line.isprintable(), line


@contextmanager
def _limited() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise AssertionError(f"reading takes more than {SECONDS:g} s of processor time")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


def kept(formats: Mapping[str, Format]) -> list[tuple[str, Path]]:
    """The formats and the files of FOUND that are of them."""
    return [(name, path) for name in formats for path in sorted((FOUND / name).glob("*")) if path.is_file()]
