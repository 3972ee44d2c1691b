"""The same for files whose readers need PyTorch."""

from pathlib import Path

import pytest
from hypothesis import given

from tests.fuzz.checking import CASES, check, check_edits, kept, share_of_cases
from tests.fuzz.framework_formats import FORMATS
from tests.fuzz.mutations import Edit, edits

each_format = pytest.mark.parametrize("name", FORMATS)


@each_format
def test_what_is_written_is_read(name: str) -> None:
    form = FORMATS[name]
    check(form, form.example()[1])


@each_format
def test_edited_files(name: str) -> None:
    form = FORMATS[name]

    @share_of_cases(FORMATS, CASES // 5)
    @given(edits(form.kinds))
    def try_edits(changes: list[Edit]) -> None:
        check_edits(form, changes)

    try_edits()


@pytest.mark.parametrize(("name", "path"), kept(FORMATS), ids=lambda x: x if isinstance(x, str) else x.name)
def test_what_once_was_wrong(name: str, path: Path) -> None:
    check(FORMATS[name], path.read_bytes())
