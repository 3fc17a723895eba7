"""Ways of writing an answer that mean the same, and near ones that do not: pairs.jsonl and laws about units."""

import json
from pathlib import Path

import pytest

from qerl_pl.rewards.equivalence import judge
from qerl_pl.rewards.math import NumericAnswer
from qerl_pl.rewards.quantities import quantity
from qerl_pl.rewards.units import unit_of

PAIRS = list(map(json.loads, Path(__file__).with_name("pairs.jsonl").read_text().splitlines()))
NAMES = (
    "cm,mm,km,inches,feet,kg,mg,pounds,minutes,hours,days,m/s,km/h,mph,cm^2,square feet,acres,mL,cubic inches,gallons"
)
NAMES += ",cents,dollars,N,kJ,kWh,kPa"


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
