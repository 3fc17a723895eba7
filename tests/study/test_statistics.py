"""The statistics by which a study compares arms: significance test, confidence interval, power, and Holm's adjustment
for several comparisons."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from qerl_pl.study.statistics import (
    ALPHA,
    compare,
    holm,
    mean,
    pairs_to_accept,
    power,
    seeds_needed,
    smallest_p,
    smallest_size,
)


def flipped_p(values: list[float], centre: float = 0.0) -> float:
    """Compute the p-value of the sign-flip test of a mean of ``centre`` by its definition: of all ways to flip the
    signs of the centred values, the share in which the mean is at least as far from 0 as without flips."""
    shifted = np.asarray(values) - centre
    seen = abs(shifted.mean())
    signs = itertools.product((1, -1), repeat=len(values))
    return float(np.mean([abs((shifted * each).mean()) >= seen - 1e-12 for each in signs]))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("pairs", [2, 5, 6, 9])
def test_the_p_value_is_that_of_the_definition_and_of_scipy(seed, pairs):
    values = np.random.default_rng(seed).normal(0.5, 1, pairs)
    found = compare(values.tolist())
    assert found.p == pytest.approx(flipped_p(values.tolist()))
    exact = stats.permutation_test((values,), np.mean, permutation_type="samples", n_resamples=2**pairs)
    assert found.p == pytest.approx(exact.pvalue)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("pairs", [6, 8, 10])
def test_the_interval_has_the_means_that_the_test_does_not_reject(seed, pairs):
    values = np.random.default_rng(seed).normal(0.5, 1, pairs).tolist()
    low, high = compare(values).difference[1:3]
    step = 1e-6
    for inside in (low + step, (low + high) / 2, high - step):
        assert flipped_p(values, inside) > ALPHA
    for outside in (low - step, high + step, low - 1):
        assert flipped_p(values, outside) <= ALPHA
    assert (flipped_p(values) <= ALPHA) == (not low <= 0 <= high), "interval and test never contradict each other"


def test_five_pairs_have_no_finite_interval_because_no_test_of_them_can_reject():
    found = compare([1.0, 2.0, 0.5, 3.0, 1.5])
    assert found.p == 2 / 2**5
    assert found.difference == (1.6, -math.inf, math.inf, 5)
    assert math.isnan(compare([1.0]).p)
    assert math.isnan(compare([]).difference.value)
    assert compare([0.0, 0.0, 0.0]).p == 1


@pytest.mark.parametrize("pairs", [6, 10, 20])
@pytest.mark.parametrize("kind", ["normal", "heavy tails"])
def test_intervals_of_differences_hold_the_truth_as_often_as_they_say(pairs, kind):
    draw = np.random.default_rng(2)
    samples = draw.normal(3, 1, (400, pairs)) if kind == "normal" else 3 + draw.standard_t(3, (400, pairs))
    if pairs > 10:
        samples = samples[:60]  # 2^16 subsets each
    covered = [each.low <= 3 <= each.high for values in samples for each in [compare(values.tolist()).difference]]
    steps = 2 ** min(pairs, 16)  # possible p-values
    level = 1 - 2 * math.floor(ALPHA / 2 * steps) / steps  # at least 95 %, as the test is discrete
    assert np.mean(covered) == pytest.approx(level, abs=0.03 if pairs <= 10 else 0.06)


@pytest.mark.parametrize("num", [3, 5, 10])
def test_intervals_of_means_hold_the_truth_as_often_as_they_say(num):
    samples = np.random.default_rng(3).normal(3, 1, (600, num))
    covered = [each.low <= 3 <= each.high for each in (mean(values.tolist()) for values in samples)]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.03)


def test_values_that_are_not_finite_are_left_out():
    assert compare([0.1, math.nan, 0.2, math.inf]) == compare([0.1, 0.2])
    assert mean([1.0, math.nan, 3.0]) == mean([1.0, 3.0])
    assert mean([1.0, math.inf]).num == 1
    assert mean([]).num == 0


def test_holm_is_the_step_down_of_its_definition():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == pytest.approx([1, 1])
    adjusted = holm([0.01, math.nan, 0.02])
    assert adjusted[0] == pytest.approx(0.02)
    assert math.isnan(adjusted[1])


def test_few_seeds_can_accept_nothing():
    assert [smallest_p(pairs) for pairs in (1, 5, 6, 10)] == [1, 0.0625, 0.03125, 2 / 1024]
    assert pairs_to_accept(1) == 6
    assert pairs_to_accept(5) == 8, "0.05 / 5 is below 2 / 2^7"
    assert power(100, 7, comparisons=5) == 0
    assert power(100, 8, comparisons=5) == 1
    assert math.isnan(smallest_size(7, comparisons=5))


@pytest.mark.parametrize(("pairs", "comparisons"), [(8, 1), (10, 5), (14, 1), (14, 3)])
def test_power_is_what_the_deciding_test_accepts_in_a_simulation(pairs, comparisons):
    size, trials = 1.1, 600 if pairs <= 10 else 60
    samples = np.random.default_rng(4).normal(size, 1, (trials, pairs))
    accepted = np.mean([compare(values.tolist()).p <= ALPHA / comparisons for values in samples])
    assert power(size, pairs, comparisons) == pytest.approx(accepted, abs=0.06 if pairs <= 10 else 0.15)


def test_the_smallest_difference_and_the_number_of_seeds_have_80_percent_power():
    assert power(smallest_size(10, 5), 10, 5) == pytest.approx(0.8, abs=0.01)
    assert smallest_size(10, 5) == pytest.approx(1.39, abs=0.05), "by another simulation"
    assert smallest_size(20) < smallest_size(10) < smallest_size(10, 5)
    for difference in (0.01, 0.02, 0.1):
        num = seeds_needed(difference, 0.03, 3)
        assert num is not None
        assert power(difference / 0.03, num, 3) >= 0.8
        assert num == pairs_to_accept(3) or power(difference / 0.03, num - 1, 3) < 0.8
    assert seeds_needed(1e-9, 1.0) is None
    assert seeds_needed(0.0, 1.0) is None
    assert seeds_needed(0.02, 0.0, 2) == pairs_to_accept(2) == 7
