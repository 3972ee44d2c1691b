"""Files of all formats, made by their own writers and then edited: they are read, or refused in a line. None of it needs a framework."""

from pathlib import Path

import pytest
from hypothesis import given

from tests.fuzz.checking import CASES, check, check_edits, kept, share_of_cases
from tests.fuzz.formats import FORMATS
from tests.fuzz.mutations import Edit, edits

each_format = pytest.mark.parametrize("name", FORMATS)


@each_format
def test_what_is_written_is_read(name: str) -> None:
    form = FORMATS[name]
    check(form, form.example()[1])


@each_format
def test_edited_files(name: str) -> None:
    form = FORMATS[name]

    @share_of_cases(FORMATS, CASES * 4 // 5)
    @given(edits(form.kinds))
    def try_edits(changes: list[Edit]) -> None:
        check_edits(form, changes)

    try_edits()


@pytest.mark.parametrize(("name", "path"), kept(FORMATS), ids=lambda x: x if isinstance(x, str) else x.name)
def test_what_once_was_wrong(name: str, path: Path) -> None:
    check(FORMATS[name], path.read_bytes())
