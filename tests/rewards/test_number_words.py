"""Numbers in words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qerl_pl.rewards.number_words import in_digits
from qerl_pl.rewards.numbers import parse_number

BELOW_20 = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
TENS = "twenty thirty forty fifty sixty seventy eighty ninety"


def spelled(number: int, joint: str) -> str:
    """English, below a million; ``joint`` stands after the hundreds."""
    if number < 20:
        return BELOW_20.split()[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return TENS.split()[tens - 2] + (f"-{spelled(ones, joint)}" if ones else "")
    size, unit = (1000, " thousand") if number >= 1000 else (100, " hundred")
    high, low = divmod(number, size)
    rest = f"{joint if size == 100 else ' '}{spelled(low, joint)}" if low else ""
    return spelled(high, joint) + unit + rest


@given(number=st.integers(0, 999_999), joint=st.sampled_from([" ", " and "]), capital=st.booleans())
def test_every_number_below_a_million_is_read(number, joint, capital):
    words = spelled(number, joint)
    assert in_digits(f"{words.capitalize() if capital else words} apples") == f"{number} apples"


@pytest.mark.parametrize("text", ["none", "someone", "often", "two thirds", "one-half", "a quarter", "4 or five", "-"])
def test_what_is_no_whole_number_stays_as_it_is(text):
    assert in_digits(text) == text


def test_two_numbers_in_words_are_no_answer():
    assert parse_number("one or two") is None
