"""Answers with units: compared in the unit of the known answer, by the table of ``units``."""

from __future__ import annotations

import pytest

from qerl_pl.rewards.equivalence import judge
from qerl_pl.rewards.math import NumericAnswer
from qerl_pl.rewards.quantities import quantity
from qerl_pl.rewards.units import unit_of

NAMES = ("cm", "mm", "km", "inches", "feet", "kg", "mg", "pounds", "minutes", "hours", "days", "m/s", "km/h", "mph")
NAMES += ("cm^2", "square feet", "acres", "mL", "cubic inches", "gallons", "cents", "dollars", "N", "kJ", "kWh", "kPa")


@pytest.mark.parametrize("known", NAMES)
def test_a_value_equals_itself_in_every_unit_of_its_dimension_and_in_no_other(known):
    unit = unit_of(known)
    assert unit is not None
    for name in NAMES:
        other = unit_of(name)
        assert other is not None
        ratio = unit.per(other)
        if ratio is None:
            assert judge(rf"6\text{{ {known}}}", rf"6\text{{ {name}}}").score == 0
            continue
        value = 6 * ratio[0]
        given = rf"\frac{{{value.numerator}}}{{{value.denominator}}}\text{{ {name}}}"
        assert judge(rf"6\text{{ {known}}}", given).score == 1
        assert judge(rf"6\text{{ {known}}}", rf"6\text{{ {name}}}").score == (1 if ratio[0] == 1 else 0)


@pytest.mark.parametrize(
    ("known", "given", "score"),
    [
        (r"6\text{ cm}", "0.06 m", 1),
        (r"6\text{ cm}", "60mm", 1),
        (r"6\text{ cm}", r"x=60\text{ mm}", 1),
        (r"6\text{ cm}", "6", 1),
        (r"6\sqrt{2} \text{ cm}", r"60\sqrt2\text{ mm}", 1),
        (r"6\sqrt{2} \text{ cm}", r"6\sqrt2\text{ m}", 0),
        (r"90\text{ km/h}", r"90\frac{\text{km}}{\text{h}}", 1),
        (r"90\text{ km/h}", r"90\text{ km}\cdot\text{h}^{-1}", 1),
        (r"90\text{ km/h}", "25 metres per second", 1),
        (r"90\text{ km/h}", "90 h/km", 0),
        (r"2\text{ hours }30\text{ minutes}", r"150\text{ min}", 1),
        (r"2\text{ hours }30\text{ minutes}", "2 h and 30 min", 1),
        (r"2\text{ hours }30\text{ minutes}", "30 hours 2 minutes", 0),
        (r"5\text{ feet }3\text{ inches}", "63 inches", 1),
        ("3.5", r"3 \text{ dollars and } 50 \text{ cents}", 1),
        (r"\$12.5", "1250 cents", 1),
        (r"\$12.5", "12.5 cents", 0),
        (r"\$36", "36 dollars per hour", 1),
        (r"\frac{\pi}{6}", r"30^\circ", 1),
        (r"60^\circ", r"60\text{ radians}", 0),
        (r"60^\circ", r"\frac{\pi}{3}\text{ radians}", 1),
        (r"60^\circ", r"\frac{\pi}{3}", 0),  # without a unit it is in that of the known answer
        (r"100^{\circ} \mathrm{C}", r"100^\circ", 1),
        (r"100^{\circ} \mathrm{C}", r"100^\circ F", 0),
        (r"20\%", "200\u2030", 1),
        ("0.05", r"500\text{ basis points}", 1),
        ("5", "5g", 1),
        ("5", "5x", 0),
        ("2mg", "2 m g", 1),  # mass times gravity
        (r"5\ \mu \mathrm{m}", "0.005 mm", 1),
    ],
)
def test_units_are_compared_dropped_or_left_as_variables(known, given, score):
    assert judge(known, given).score == score


@pytest.mark.parametrize("text", ["6", "6x", "6 and 8 cm", "3, 4 cm", r"\frac{1}{\sin 30^\circ}", "cm", "", "6 apples"])
def test_what_is_not_one_value_with_a_unit_is_no_quantity(text):
    assert quantity(text) is None


@pytest.mark.parametrize(
    ("known", "given", "score"),
    [
        ("$25", "25 cents", 0),
        ("$0.25", "25 cents", 1),
        ("25", "25 cents", 1),
        ("2.5", "2 hours and 30 minutes", 1),
        ("18", "$18 per day", 1),
        ("0.05", "50\u2030", 1),
    ],
)
def test_the_numeric_reward_converts_units_too(known, given, score):
    assert NumericAnswer().judge([f"<answer>{given}</answer>"], [known])[0].score == score
