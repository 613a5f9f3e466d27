"""Texts are cut before the stop string that is complete in them first."""

import pytest

from redco_flow.text.special_tokens import cut_before


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one two", ["###"], "one two"),
        ("one\ntwo\nthree", ["\n"], "one"),
        ("abcdef", ["e", "bcd"], "a"),  # "bcd" ends before "e" does
        ("abcdef", ["cd", "abcd"], ""),  # both end at one place: the longer one
        ("abc", [], "abc"),
    ],
)
def test_a_text_ends_before_the_string_that_is_complete_first(text, stops, expected):
    assert cut_before(text, stops) == expected
