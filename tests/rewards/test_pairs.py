"""Examples in files: completions with the part that counts as their answer (readings.jsonl), and pairs of answers that
are equal or not (pairs.jsonl)."""

import json
from pathlib import Path

import pytest

from qerl_pl.common.types import Completion, Prompt
from qerl_pl.rewards.answers import last_boxed
from qerl_pl.rewards.equivalence import judge
from qerl_pl.rewards.format import think_answer_format
from qerl_pl.rewards.math import NumericAnswer
from qerl_pl.rewards.quantities import quantity
from qerl_pl.rewards.units import unit_of
from qerl_pl.rewards.unmarked import answer_alone, last_math, stated_answer

PAIRS, READINGS = (
    list(map(json.loads, Path(__file__).with_name(f"{name}.jsonl").read_text().splitlines()))
    for name in ("pairs", "readings")
)
FIND = {"last_boxed": last_boxed, "last_math": last_math, "stated_answer": stated_answer, "answer_alone": answer_alone}
NAMES = (
    "cm,mm,km,inches,feet,kg,mg,pounds,minutes,hours,days,m/s,km/h,mph,cm^2,square feet,acres,mL,cubic inches,gallons"
)
NAMES += ",cents,dollars,N,kJ,kWh,kPa"


@pytest.mark.parametrize("row", READINGS, ids=lambda row: row["text"])
def test_the_answer_of_a_text_is_the_one_that_a_reader_sees(row):
    if "find" in row:
        assert FIND[row["find"]](row["text"]) == row["answer"]
    else:
        reward = think_answer_format if row["reward"] == "think_answer_format" else NumericAnswer(**row["settings"])
        completion = Completion((1,), (0.0,), True, row["text"])
        assert reward([Prompt((1,), row.get("known", ""))], [completion]) == [row["score"]]


def test_long_texts_and_unclosed_boxes_are_read():
    for text, score in (
        ("<answer>18</answer>" + "x" * 100_000, 1.0),
        ("<answer>" * 50_000 + "18</answer>", 1.0),
        ("<answer>" + "1 " * 50_000 + "</answer>", 0.0),
    ):
        assert NumericAnswer().judge([text], ["18"])[0].score == score
    assert last_boxed("\\boxed{" * 30_000) is None
    assert think_answer_format([Prompt((1,), "")], [Completion((1,), (0.0,), True, "<think>" * 20_000)]) == [0.0]


@pytest.mark.parametrize("row", PAIRS, ids=lambda row: f"{row['by']} {row['known']}")
def test_an_answer_is_right_in_every_way_of_writing_it_and_near_ones_are_wrong(row):
    def score(written: str) -> float | None:
        if row["by"] == "math":
            return judge(row["known"], written).score
        return NumericAnswer().judge([f"so <answer>{written}</answer>"], [row["known"]])[0].score

    assert [written for written in row.get("right", ()) if score(written) != 1.0] == []
    assert [written for written in row.get("wrong", ()) if score(written) != 0.0] == []


@pytest.mark.parametrize("known", NAMES.split(","))
def test_a_value_equals_itself_in_every_unit_of_its_dimension_and_in_no_other(known):
    unit = unit_of(known)
    assert unit is not None
    for name in NAMES.split(","):
        other = unit_of(name)
        assert other is not None
        ratio = unit.per(other)
        assert judge(rf"6\text{{ {known}}}", rf"6\text{{ {name}}}").score == (ratio is not None and ratio[0] == 1)
        if ratio is not None:
            value = 6 * ratio[0]
            converted = rf"\frac{{{value.numerator}}}{{{value.denominator}}}\text{{ {name}}}"
            assert judge(rf"6\text{{ {known}}}", converted).score == 1


@pytest.mark.parametrize("text", ["6", "6x", "6 and 8 cm", "3, 4 cm", r"\frac{1}{\sin 30^\circ}", "cm", "", "6 apples"])
def test_what_is_not_one_value_with_a_unit_is_no_quantity(text):
    assert quantity(text) is None
