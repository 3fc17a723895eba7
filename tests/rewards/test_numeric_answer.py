"""The reward NumericAnswer: which part of a completion it takes as the answer, and which notations of a number count as
equal."""

import os
import pickle
import re
from fractions import Fraction
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qerl_pl.common.types import Completion, Prompt
from qerl_pl.rewards.answers import last_boxed, last_hash, last_tagged, seen
from qerl_pl.rewards.math import NumericAnswer
from qerl_pl.rewards.number_words import in_digits
from qerl_pl.rewards.numbers import last_number, parse_number

DATA = Path(os.environ.get("QERL_DATA", Path(__file__).parents[2].parent / "shared" / "data"))


def score(text: str, answer: str, **settings) -> float | None:
    return NumericAnswer(**settings)([Prompt((1,), answer)], [Completion((1,), (0.0,), True, text)])[0]


def judged(reward: NumericAnswer, text: str, answer: str) -> float | None:
    return reward.judge([text], [answer])[0].score


def test_unknown_settings_are_refused():
    with pytest.raises(ValueError, match="marker is 'tag'"):
        NumericAnswer(marker="tag")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="fallback is 'first'"):
        NumericAnswer(fallback="first")  # pyright: ignore[reportArgumentType]


def test_it_survives_a_pickle():
    reward = pickle.loads(pickle.dumps(NumericAnswer(marker="any", fallback="last_number")))
    assert judged(reward, "18", "18") == 1.0


@given(value=st.integers(-(10**12), 10**12), places=st.integers(0, 6))
def test_reading_is_exact_and_inverts_writing(value, places):
    exact = Fraction(value, 10**places)
    whole, part = divmod(abs(value), 10**places)
    written = f"{'-' if value < 0 else ''}{whole:,}" + (f".{part:0{places}d}" if places else "")
    for form in (written, written.replace(",", ""), f"{exact}", f"\\boxed{{{written}}}", f"{written} apples"):
        number = parse_number(form)
        assert number is not None
        assert number.value == exact


@given(text=st.text(alphabet="<>/answer\\boxed{}#1 \n", max_size=80))
def test_extraction_never_fails_and_returns_a_part_of_the_text(text):
    for find in (last_tagged, last_boxed, last_hash):
        span = find(text)
        assert span is None or span in text


UNSEEN = [r"\phantom{", r"\cancel{", "~~", "<!--", "-->", "<s>", "</s>", "%", " \t%", r"\begin{comment}", r"\iffalse "]
UNSEEN += [r"\end{comment}", r"\fi", "<p hidden>", "</p>", r"\color{white}", r"\textcolor{white}{", r"\boxed{5}"]


@given(parts=st.lists(st.sampled_from([*UNSEEN, "}", "\n", " 5"]), max_size=8))
def test_the_first_look_misses_nothing_that_a_reader_does_not_see(parts):
    text = "".join(parts)
    with patch("qerl_pl.rewards.answers._HAS_UNSEEN", (re.compile(""), re.compile(""))):  # every text is read whole
        expected = seen(text)
    assert seen(text) == expected


# ---- numbers in words ---------------------------------------------------------------------------------------------

BELOW_20 = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
TENS = "twenty thirty forty fifty sixty seventy eighty ninety"


def spelled(number: int, joint: str) -> str:
    """Write a number below a million in English words; ``joint``, such as " and ", is put between the hundreds and the
    rest."""
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


@pytest.mark.parametrize("sign", ["<", ">", "<=", ">=", "!=", "\u2264", "\u2265", "\u2260", "\\leq", "\\ge", "\\ne"])
def test_a_number_behind_a_sign_of_comparison_is_a_bound_and_one_behind_an_arrow_or_in_a_quotation_is_not(sign):
    for line in (f"so x {sign} 42", f"so $x{sign}42$.", f"(x + 1) {sign} 42 apples"):
        assert last_number(line) is None, line
    for line in (
        "40 + 2 -> 42",
        "40 + 2 => 42",
        "> 42",
        "<<40+2=42>>42",
        "<b>42</b>",
        "<answer>42",
        "40 + 2</p> 42",
        "Total:<br/> 42",
        "<|assistant|> 42",
        "40 + 2 \u2192 42",
    ):
        assert last_number(line) == (42, False), line
