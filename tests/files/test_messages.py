"""Values of a user in messages: short, however long they are, and still recognised by their beginning."""

import pytest

from ds_trainer.files.messages import kind_of, listed, quoted, shown
from ds_trainer.ranks.failures import first_line


def test_values_are_cut_where_they_are_long() -> None:
    """As JSON and as Python write them; at most 60 characters by default."""
    assert shown({"a": [1, None]}) == '{"a": [1, null]}'
    assert shown("x" * 100_000) == '"' + "x" * 56 + "..."
    assert len(quoted("x" * 100_000)) == 60
    assert listed(range(25)) == "".join(f"{n}, " for n in range(20))[:-2] + " and 5 more"


@pytest.mark.parametrize(
    ("value", "words"), [(None, "null"), (True, "true"), (1, "a whole number"), ("", "text"), ([], "a list")]
)
def test_values_are_named_in_the_words_of_json(value: object, words: str) -> None:
    """Not as Python's classes."""
    assert kind_of(value) == words


@pytest.mark.parametrize(
    ("message", "line"),
    [("one\ntwo", "one"), ("wrong field:\n  'abc' is no number\nmore", "wrong field: 'abc' is no number"), ("", "")],
)
def test_an_error_says_first_what_matters(message: str, line: str) -> None:
    """Its first line, with the next where that ends with a colon."""
    assert first_line(ValueError(message)) == line
