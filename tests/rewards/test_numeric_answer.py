"""NumericAnswer: which span counts, and which ways of writing a number are equal."""

import json
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
from qerl_pl.rewards.numbers import last_number, parse_number

DATA = Path(os.environ.get("QERL_DATA", Path(__file__).parents[2].parent / "shared" / "data"))


def score(text: str, answer: str, **settings) -> float | None:
    return NumericAnswer(**settings)([Prompt((1,), answer)], [Completion((1,), (0.0,), True, text)])[0]


def judged(reward: NumericAnswer, text: str, answer: str) -> float | None:
    return reward.judge([text], [answer])[0].score


SAME = {
    "18": [
        "18.0",
        "+18",
        "$18",
        "$18.00",
        "18 dollars",
        "18.",
        "18 km/h",
        "\\$18",
        "**18**",
        "$18$",
        "\\(18\\)",
        "36/2",
    ]
    + ["x = 18", "6 * 3 = 18", "18%", "18\\%", "18 percent", "\\text{18 dollars}", "18 \\text{ dollars}", "1.8e1"]
    + [
        "\uff11\uff18",
        "\u0661\u0668",
        "18 m^2",
        "18 m\u00b2",
        "18^\\circ",
        "18\u00b0",
        "\\boxed{18}",
        "US$18",
        "018",
        "USD18",
        "Rs18",
        "Rs.18",
        "18cm",
        "18m",
        "18 tennis balls",
        "Twice a week, so 18",
        "=18",
    ],
    "-5": [
        "- 5",
        "\u22125",
        "-$5",
        "$-5",
        "-5.00 degrees",
        "-10/2",
        "-\\frac{10}{2}",
        "minus 5",
        "Negative $5",
        "negative five",
    ],
    "70000": ["70k", "$70K", "seventy thousand"],
    "1,250,000": [
        "1250000",
        "1{,}250{,}000",
        "1\\,250\\,000",
        "1 250 000",
        "1.25 million",
        "1.25 \\times 10^6",
        "1.25e6",
    ],
    "0.5": ["1/2", ".5", "\u00bd", "\\frac{1}{2}", "\\dfrac12", "50%", "0.50"],
    "2.5": ["2 1/2", "2\u00bd", "2\\frac12", "2 and 1/2 cups", "5/2", "2\\tfrac{1}{2}"],
}


@pytest.mark.parametrize(("gold", "written"), [(gold, form) for gold, forms in SAME.items() for form in forms])
def test_a_number_is_right_in_every_way_of_writing_it(gold, written):
    assert score(f"so <answer>{written}</answer>", gold) == 1.0


@pytest.mark.parametrize(
    "span",
    [
        "",
        " ",
        "19",
        "-18",
        "1.8",
        "180",
        "18 or 19",
        "18, 19",
        "18-19",
        "17 and 18",
        "1,8",
        "1,80",
        "18:30",
        "18.5.3",
        "18/0",
    ]
    + ["\\sqrt{18}", "2^18", "18 * 1", "\u00b118", "\\pm 18", "nothing", "18 = 19", "1e18", "18 million", "9" * 5000],
)
def test_a_wrong_or_ambiguous_span_scores_zero(span):
    assert score(f"<answer>{span}</answer>", "18") == 0.0


@pytest.mark.parametrize(
    ("gold", "span"),
    [("5", f"{before}5") for before in ("\u221a", "sqrt ", "log ", "minus ", "negative ", "not ", "twice ", "half of ")]
    + [("5", span) for span in ("sqrt(5)", "square root of 5", "Double 5", "5\u03c0", "5 pi", "5x", "5x^2", "5!")]
    + [("2", "2 and a half"), ("2", "2 and three quarters"), ("1", "1 hour and a half"), ("18", "18M"), ("70", "70k")],
)
def test_an_expression_is_not_the_number_in_it(gold, span):
    assert score(f"<answer>{span}</answer>", gold) == 0.0


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


@pytest.mark.parametrize(
    ("name", "rows"), [pytest.param("gsm8k_train", 7473, marks=pytest.mark.slow), ("gsm8k_test", 1319)]
)
def test_every_gsm8k_answer_is_right_in_other_forms_and_wrong_values_are_not(name, rows):
    path = DATA / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not there; set QERL_DATA to the folder that holds the GSM8K files")
    golds = [json.loads(line)["answer"] for line in path.open()]
    assert len(golds) == rows
    tag, every = NumericAnswer(), NumericAnswer(marker="any")
    for gold in golds:
        final = gold.rpartition("####")[2].strip()
        value = int(final.replace(",", ""))
        assert judged(every, gold, gold) == 1.0  # the whole solution, with its own #### line
        for form in (f"${value:,}.00", f"{2 * value}/2", f"x = {value} \\text{{ units}}", final):
            assert judged(tag, f"<think>{value + 1}</think><answer>{form}</answer>", gold) == 1.0, (gold, form)
        for wrong in (value + 1, -value or 7, 10 * value or 3):
            assert judged(tag, f"{final} <answer>{wrong:,}</answer> \\boxed{{{final}}}", gold) == 0.0, gold
