"""Compute interquartile means, paired differences, and the number of seeds that shows a difference, with scipy.

Intervals are 95 % bootstrap intervals. With several strata (e.g. base models), the bootstrap resamples within each
(arXiv 2108.13264, rliable).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import optimize, stats

LEVEL = 0.95
RESAMPLES = 9999
POWER, ALPHA = 0.8, 0.05
MOST_SEEDS = 10_000


class Estimate(NamedTuple):
    """Estimate with its 95 % interval and the number of values."""

    value: float
    low: float
    high: float
    num: int


class Comparison(NamedTuple):
    """Statistics of paired differences: a readout of the first arm minus that of the second, of runs with equal
    seeds."""

    difference: Estimate
    p: float
    """P-value of a two-sided sign-flip permutation test of the mean; exact up to 13 pairs."""
    spread: float
    """Standard deviation of the differences."""
    seen: float
    """Smallest true difference that a two-sided t test at the 5 % level detects with this number of pairs and 80 %
    power."""


def interquartile_mean(strata: Sequence[Sequence[float]]) -> Estimate:
    """Estimate the interquartile mean (the mean of the middle half) of all values, with a bootstrap interval.

    Args:
        strata: values of each stratum, such as a base model; the bootstrap resamples within each.
    """

    def statistic(*samples: np.ndarray, axis: int = -1) -> Any:
        return stats.trim_mean(np.concatenate(samples, axis=axis), 0.25, axis=axis)

    return _estimate(strata, statistic)


def mean(strata: Sequence[Sequence[float]]) -> Estimate:
    """Estimate the mean of all values, with a bootstrap interval that resamples within each stratum."""

    def statistic(*samples: np.ndarray, axis: int = -1) -> Any:
        return np.concatenate(samples, axis=axis).mean(axis=axis)

    return _estimate(strata, statistic)


def _estimate(strata: Sequence[Sequence[float]], statistic: Callable[..., Any]) -> Estimate:
    samples = [each for values in strata if len(each := _finite(values))]
    num = sum(map(len, samples))
    if not num:
        return Estimate(float("nan"), float("nan"), float("nan"), 0)
    value = float(statistic(*samples))
    if any(len(sample) < 2 for sample in samples):
        return Estimate(value, float("nan"), float("nan"), num)
    if all(np.ptp(sample) == 0 for sample in samples):
        return Estimate(value, value, value, num)
    found = stats.bootstrap(
        samples,
        statistic,
        n_resamples=RESAMPLES,
        confidence_level=LEVEL,
        vectorized=True,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    return Estimate(value, float(found.confidence_interval.low), float(found.confidence_interval.high), num)


def _finite(values: Sequence[float]) -> np.ndarray:
    """Leave out values that are not finite, of runs in which a quantity was not defined or overflowed."""
    array = np.asarray(values, dtype=np.float64)
    return array[np.isfinite(array)]


def compare(strata: Sequence[Sequence[float]]) -> Comparison:
    """Estimate the mean of paired differences, and test whether it is 0.

    Args:
        strata: paired differences, one list per stratum (e.g. a base model).
    """
    estimate = mean(strata)
    values = np.concatenate([_finite(each) for each in strata] or [np.zeros(0)])
    if len(values) < 2:
        return Comparison(estimate, float("nan"), float("nan"), float("nan"))
    spread = float(values.std(ddof=1))
    p = 1.0
    if np.any(values):
        p = stats.permutation_test(
            (values,),
            np.mean,
            permutation_type="samples",
            n_resamples=RESAMPLES,
            rng=np.random.default_rng(0),
        ).pvalue
    return Comparison(estimate, float(p), spread, smallest_difference(spread, len(values)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values by Holm's step-down method.

    Rejecting where the adjusted value is at most alpha has a family-wise error rate of at most alpha. A p-value of NaN
    stays NaN, and does not count as a test.
    """
    adjusted = [float("nan")] * len(p_values)
    order = sorted((place for place, p in enumerate(p_values) if p == p), key=p_values.__getitem__)
    least = 0.0
    for rank, place in enumerate(order):
        least = max(least, min(1.0, (len(order) - rank) * p_values[place]))
        adjusted[place] = least
    return adjusted


def power(difference: float, spread: float, num: int) -> float:
    """Compute the power of a paired two-sided t test at the 5 % level for a true difference and a number of pairs."""
    shift = abs(difference) / spread * num**0.5
    limit = stats.t.ppf(1 - ALPHA / 2, num - 1)
    other = stats.nct.cdf(-limit, num - 1, shift) if shift < 5 else 0.0  # far out scipy gives NaN for this tail of 0
    return float(stats.nct.sf(limit, num - 1, shift) + other)


def smallest_difference(spread: float, num: int) -> float:
    """Compute the smallest true difference that a paired t test at the 5 % level on ``num`` pairs detects with a power
    of 80 %."""
    if spread == 0 or num < 2:
        return 0.0 if spread == 0 else float("nan")
    root: Any = optimize.brentq(lambda size: power(size * spread, spread, num) - POWER, 1e-3, 100)
    return float(root) * spread


def seeds_needed(difference: float, spread: float) -> int | None:
    """Return the number of pairs with which a paired t test at the 5 % level detects a true difference with 80 %
    probability; None if it is more than 10 000."""
    if spread == 0:
        return 2
    low, high = 1, 2
    while difference == 0 or power(difference, spread, high) < POWER:
        low, high = high, high * 2
        if high > MOST_SEEDS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power(difference, spread, middle) >= POWER else (middle, high)
    return high
