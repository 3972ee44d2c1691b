"""Messages of errors: legible whatever the values that they repeat."""

import pytest

from baechi_ext.errors import BaechiError, FileError, InfeasibleError, legible


@pytest.mark.parametrize("value", ["a" * 5000, list(range(5000)), {"a": ["b" * 3000] * 3}, "it's" * 2000, 'say "so"' * 900, "[" * 4000])
def test_a_long_value_is_cut_and_the_advice_stays(value: object) -> None:
    message = str(FileError(f"the file's \"nodes\" are {value!r}; it can't be read: write it again"))
    assert message.startswith("the file's \"nodes\" are ")
    assert message.endswith("; it can't be read: write it again")
    assert len(message) < 270


def test_short_values_and_prose_stay() -> None:
    prose = "the grapher's own, " * 30
    for message in (f"{prose}'a' and ['b']", "'" + "x" * 198 + "'", "(" + "word " * 60 + ")"):
        assert str(BaechiError(message)) == message


def test_a_word_without_quotes_is_cut() -> None:
    assert len(str(BaechiError(f"op {'x' * 5000}: it is gone"))) < 300
    assert str(BaechiError(f"op {'x' * 5000}: it is gone")).endswith(": it is gone")


def test_of_a_very_long_message_the_ends_stay() -> None:
    message = str(InfeasibleError("begin " + "word " * 5000 + "end", "unknown"))
    assert (len(message) <= 1800, message[:6], message[-4:]) == (True, "begin ", " end")


def test_what_a_terminal_obeys_is_escaped() -> None:
    assert str(FileError("a\x1b[31mb\x00c\u202ed\ud800e\nf\tg")) == r"a\x1b[31mb\x00c\u202ed\ud800e" + "\nf" + r"\tg"
    assert legible("äöü 日本") == "äöü 日本"


@pytest.mark.parametrize("text", ["[" * 100_000, "'" * 100_000, "'a" * 50_000, "[']" * 30_000, "x" * 1_000_000])
def test_it_is_quick_and_changes_nothing_twice(text: str) -> None:
    once = legible(text)
    assert len(once) <= 1800
    assert legible(once) == once
