"""NumericAnswer: which span counts, and which ways of writing a number are equal."""

import os
import pickle
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qerl_pl.common.types import Completion, Prompt
from qerl_pl.rewards.answers import last_boxed, last_hash, last_tagged, marked_answer
from qerl_pl.rewards.math import NumericAnswer
from qerl_pl.rewards.number_words import in_digits
from qerl_pl.rewards.numbers import last_number, parse_number

DATA = Path(os.environ.get("QERL_DATA", Path(__file__).parents[2].parent / "shared" / "data"))


def score(text: str, answer: str, **settings) -> float | None:
    return NumericAnswer(**settings)([Prompt((1,), answer)], [Completion((1,), (0.0,), True, text)])[0]


def judged(reward: NumericAnswer, text: str, answer: str) -> float | None:
    return reward.judge([text], [answer])[0].score


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>17</answer> no: <answer>18</answer>", 1.0),
        ("<answer>18</answer> no: <answer>17</answer>", 0.0),
        ("<answer>18</answer> and \\boxed{17} and\n#### 17", 1.0),
        ("<answer>17</answer> and \\boxed{18} and\n#### 18", 0.0),
        ("<answer><answer>18</answer></answer>", 1.0),
        ("<answer>17</answer><answer>18", 0.0),  # cut off: the answer before it counts
        ("<answer>18", 0.0),
        ("18</answer>", 0.0),
        ("<answer>18</answer", 0.0),
        ("<answer>\n\\boxed{18}\n</answer>", 1.0),
        ("<ANSWER>18</ANSWER>", 1.0),
        ("The answer is 18.", 0.0),
        ("", 0.0),
        ("<answer>18</answer>" + "x" * 100_000, 1.0),
        ("<answer>" * 50_000 + "18</answer>", 1.0),
        ("<answer>" + "1 " * 50_000 + "</answer>", 0.0),
    ],
)
def test_only_the_last_closed_tag_counts(text, expected):
    assert score(text, "18") == expected


@pytest.mark.parametrize(
    ("marker", "text", "expected"),
    [
        ("boxed", "\\boxed{17} then \\boxed{18}", 1.0),
        ("boxed", "\\boxed{18} then \\boxed{17}", 0.0),
        ("boxed", "<answer>18</answer>", 0.0),
        ("boxed", "\\boxed{18} then \\boxed{17", 1.0),
        ("hash", "#### 17\n#### $18.00\n", 1.0),
        ("hash", "\\boxed{18}", 0.0),
        ("any", "\\boxed{18}\n#### 17", 1.0),
        ("any", "#### Step 17\nso 18\n#### 18", 1.0),
        ("any", "#### 18\n#### Step 2: check", 1.0),
        ("any", "#### 3. Total\nIt is 18.", 0.0),
    ],
)
def test_the_marker_decides_which_span_counts(marker, text, expected):
    assert score(text, "18", marker=marker) == expected


def test_unmarked_answers_count_only_when_asked_for_and_only_without_a_mark():
    text = "She buys 3 bags of 6.\nSo she has $18 left.\n\nThat is all."
    assert score(text, "18") == 0.0
    assert score(text, "18", fallback="last_number") == 1.0
    assert score("The answer is 18 for 2 days.", "18", fallback="last_number") == 1.0
    assert score("He makes **18** in 2 days.", "18", fallback="last_number") == 1.0
    assert score("<answer>17</answer> 18", "18", fallback="last_number") == 0.0
    assert score("<answer>17 or 18</answer> 18", "18", fallback="last_number") == 0.0
    assert last_number("none at all") is None


@pytest.mark.parametrize("gold", ["", "unknown", "3 or 4", "#### ", "72 #### x"])
def test_an_unreadable_known_answer_is_unscored(gold):
    assert score("<answer>18</answer>", gold) is None


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


def test_of_nested_boxes_the_outermost_counts_and_escaped_braces_do_not_close_it():
    assert last_boxed("\\boxed{\\boxed{5}}") == "\\boxed{5}"
    assert last_boxed("\\boxed{\\{1, 2\\}} }") == "\\{1, 2\\}"
    assert last_boxed("{ \\fbox{\\frac{1}{2}}") == "\\frac{1}{2}"
    assert last_boxed("\\boxed{" * 30_000) is None
    assert marked_answer("\\boxed{1} <answer>2</answer>", "any") == "2"


# ---- numbers in words ---------------------------------------------------------------------------------------------

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
