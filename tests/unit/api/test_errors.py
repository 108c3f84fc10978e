"""Texts of errors: whatever user code raises or returns can be told."""

from rl_core.api.errors import MAX_TEXT, shown, text_of


class Mute(Exception):
    def __str__(self):
        raise RuntimeError

    __repr__ = __str__


def test_a_text_of_any_size_is_cut_and_one_that_cannot_be_made_or_sent_is_replaced():
    assert text_of(ValueError("as it is")) == "as it is"
    text = text_of(ValueError("x" * 10_000_000))
    assert text.startswith("x" * MAX_TEXT) and text.endswith("... (10000000 characters)") and len(text) < MAX_TEXT + 50
    assert text_of(ValueError("\udcff")) == "?"
    assert text_of(Mute()) == "(its text cannot be made: RuntimeError)"


def test_a_value_of_any_size_or_without_a_repr_is_shown_short():
    assert [shown(value) for value in ("good", b"1", [""], None)] == ["'good'", "b'1'", "['']", "None"]
    assert all(
        len(shown(value)) < 200 for value in ("x" * 10_000_000, list(range(10_000)), {"k": "x" * 10_000}, Mute())
    )
