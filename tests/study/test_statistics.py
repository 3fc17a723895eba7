"""Interquartile means, paired differences, Holm's adjustment and numbers of seeds."""

from __future__ import annotations

import math

import numpy as np
import pytest

from qerl_pl.study.statistics import (
    compare,
    holm,
    interquartile_mean,
    mean,
    power,
    seeds_needed,
    smallest_difference,
)


def test_the_interquartile_mean_is_that_of_the_middle_half_over_all_strata():
    values = [100.0, 1, 2, 3, 4, 5, 6, -100]
    assert interquartile_mean([values]).value == pytest.approx(np.mean([2, 3, 4, 5]))
    assert interquartile_mean([values[:3], values[3:]]).value == interquartile_mean([values]).value
    assert interquartile_mean([values]).num == 8


def test_intervals_hold_the_truth_about_as_often_as_they_say_and_repeat():
    draw = np.random.default_rng(0)
    estimates = [mean([draw.normal(3.0, 1.0, 20).tolist()]) for _ in range(60)]
    assert 0.85 <= np.mean([each.low <= 3 <= each.high for each in estimates]) <= 1
    assert mean([[1.0, 2, 5]]) == mean([[1.0, 2, 5]])


def test_a_stratified_interval_does_not_count_what_strata_differ_by():
    low, high = [0.0, 0.1, 0.2, 0.1], [10.0, 10.1, 10.2, 10.1]
    strata, pooled = mean([low, high]), mean([low + high])
    assert strata.value == pytest.approx(pooled.value)
    assert strata.high - strata.low < 0.1 < 1 < pooled.high - pooled.low


@pytest.mark.parametrize("strata", [[], [[]], [[1.0]], [[1.0, 2.0], [3.0]]])
def test_what_has_no_interval_has_none(strata):
    estimate = interquartile_mean(strata)
    assert math.isnan(estimate.low)
    assert math.isnan(estimate.value) == (estimate.num == 0)
    assert interquartile_mean([[2.0, 2.0]])[:3] == (2, 2, 2)


def test_a_paired_test_of_few_seeds_is_exact():
    found = compare([[1.0, 2.0, 0.5, 3.0, 1.5]])
    assert found.p == pytest.approx(2 / 2**5), "only the signs as they are and all turned are as extreme"
    assert found.difference.value == pytest.approx(1.6)
    assert found.spread == pytest.approx(np.std([1, 2, 0.5, 3, 1.5], ddof=1))
    assert compare([[0.0, 0.0, 0.0]]).p == 1
    assert math.isnan(compare([[1.0]]).p)
    assert math.isnan(compare([]).p)


def test_holm_is_the_step_down_of_its_definition():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == pytest.approx([1, 1])
    adjusted = holm([0.01, math.nan, 0.02])
    assert adjusted[0] == pytest.approx(0.02)
    assert math.isnan(adjusted[1])


def test_power_is_what_a_simulation_sees():
    draw, num, difference, spread = np.random.default_rng(0), 10, 0.8, 1.0
    samples = draw.normal(difference, spread, (20_000, num))
    t = samples.mean(axis=1) / samples.std(axis=1, ddof=1) * num**0.5
    assert power(difference, spread, num) == pytest.approx(np.mean(np.abs(t) > 2.262), abs=0.01)


def test_the_smallest_difference_and_the_number_of_seeds_have_80_percent_power():
    assert power(smallest_difference(0.03, 10), 0.03, 10) == pytest.approx(0.8, abs=1e-6)
    for difference in (0.005, 0.02, 0.1):
        num = seeds_needed(difference, 0.03)
        assert num is not None
        assert power(difference, 0.03, num) >= 0.8
        assert num == 2 or power(difference, 0.03, num - 1) < 0.8
    assert seeds_needed(1e-9, 1.0) is None
    assert seeds_needed(0.02, 0.0) == 2


def test_values_that_are_not_finite_are_left_out():
    assert compare([[0.1, float("nan"), 0.2, float("inf")]]) == compare([[0.1, 0.2]])
    assert mean([[1.0, float("nan"), 3.0], [float("-inf")]]) == mean([[1.0, 3.0]])
