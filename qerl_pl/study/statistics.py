"""Compare two arms of a study by paired differences: significance test, confidence interval and power.

One procedure gives the p-value and the interval, so that they cannot contradict each other: the two-sided sign-flip
permutation test of the mean. If the differences x are symmetric about m, flipping the signs of any subset of the values
x - m leaves their distribution as it is. The mean after flipping a subset is at least as large as the observed mean
exactly if the mean of that subset of x is at most m. So the p-value of any m, and the interval of all m that are not
rejected, follow from the means of all subsets of x (Hartigan, JASA 1969, calls them typical values).
"""

import bisect
import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from scipy import optimize, stats

ALPHA = 0.05
"""Significance level: the probability that the comparisons that decide a study together find at least one difference
that does not exist."""
POWER = 0.8
EXACT_PAIRS = 16
"""Largest number of pairs of runs for which the sign-flip test uses all subsets of the pairs; for more pairs it uses
2^16 random subsets."""
SIMULATED_PAIRS = 12
"""Largest number of pairs of runs for which the test's power is simulated. For more pairs, the power of the t test is
used, which differs by less than 2 %."""
MOST_SEEDS = 10_000


class Estimate(NamedTuple):
    """Estimate of a mean from ``num`` values, with a 95 % confidence interval. Where there are too few values, mean or
    interval is NaN or infinite."""

    value: float
    low: float
    high: float
    num: int


class Comparison(NamedTuple):
    """Statistics of the differences between two arms in a readout, over pairs of runs with equal seeds."""

    difference: Estimate
    """Mean difference. Its interval contains all true means that the test does not reject at the 5 % level."""
    p: float
    """P-value of a two-sided sign-flip permutation test of the mean; exact up to 16 pairs."""
    spread: float
    """Standard deviation of the differences."""


def mean(values: Sequence[float]) -> Estimate:
    """Estimate a mean with the interval of Student's t distribution. Values that are NaN or infinite are left out."""
    finite = _finite(values)
    if len(finite) < 2:
        return Estimate(float(finite[0]) if len(finite) else math.nan, math.nan, math.nan, len(finite))
    value = float(finite.mean())
    half = float(stats.sem(finite) * stats.t.ppf(1 - ALPHA / 2, len(finite) - 1))
    return Estimate(value, value - half, value + half, len(finite))


def compare(values: Sequence[float]) -> Comparison:
    """Estimate the mean of paired differences, and test whether it is 0. NaN and infinite differences are left out."""
    finite = _finite(values)
    if len(finite) < 2:
        return Comparison(mean(finite.tolist()), math.nan, math.nan)
    sums = finite @ _subsets(len(finite)).T
    estimate = Estimate(float(finite.mean()), *_interval(sums, len(finite)), len(finite))
    return Comparison(estimate, float(_p_values(sums[None])[0]), float(finite.std(ddof=1)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust the p-values of several comparisons by Holm's step-down method, so that the probability of any false
    rejection among them is at most the level of the test. A NaN stays NaN and does not count as a test."""
    adjusted = np.array(p_values, dtype=np.float64)
    order = np.argsort(adjusted)[: np.count_nonzero(~np.isnan(adjusted))]  # NaN is sorted last
    stepped = np.maximum.accumulate(adjusted[order] * np.arange(len(order), 0, -1))
    adjusted[order] = np.minimum(1.0, stepped)
    return adjusted.tolist()


def smallest_p(pairs: int) -> float:
    """Return the smallest p-value that the sign-flip test can give with ``pairs`` pairs of runs, however large the
    differences are."""
    return min(1.0, 2.0 ** (1 - pairs))


def pairs_to_accept(comparisons: int) -> int:
    """Return the smallest number of pairs of runs with equal seeds with which a comparison can be significant at all,
    if Holm's method adjusts it for ``comparisons`` comparisons."""
    pairs = 1
    while comparisons * smallest_p(pairs) > ALPHA:
        pairs += 1
    return pairs


def power(size: float, pairs: int, comparisons: int = 1) -> float:
    """Compute the power of the sign-flip test: the probability that it finds a difference significant in Holm's first
    step, p <= 0.05 / ``comparisons``. The differences of the ``pairs`` pairs of runs are assumed to be normally
    distributed, and ``size`` is their true mean divided by their standard deviation."""
    alpha = ALPHA / comparisons
    if smallest_p(pairs) > alpha:
        return 0.0
    if pairs <= SIMULATED_PAIRS:
        return float((_p_values(_standard_sums(pairs) + size * _subsets(pairs).sum(axis=1)) <= alpha).mean())
    shift = abs(size) * pairs**0.5
    limit = stats.t.ppf(1 - alpha / 2, pairs - 1)
    other = stats.nct.cdf(-limit, pairs - 1, shift) if shift < 5 else 0.0  # far out scipy gives NaN for a tail of 0
    return float(stats.nct.sf(limit, pairs - 1, shift) + other)


@cache
def smallest_size(pairs: int, comparisons: int = 1) -> float:
    """Compute the smallest true difference between two configurations that the sign-flip test finds significant with a
    probability of 80 % after Holm's adjustment for ``comparisons`` comparisons. The unit is the standard deviation of
    the differences over pairs of runs with equal seeds. Returns NaN if there are too few pairs for any significant
    result."""
    if pairs < pairs_to_accept(comparisons):
        return math.nan
    root = optimize.bisect(lambda size: power(size, pairs, comparisons) - POWER, 0.0, 100.0, xtol=1e-3)
    return float(root)  # pyright: ignore[reportArgumentType] (a float, as full_output is False)


def seeds_needed(difference: float, spread: float, comparisons: int = 1) -> int | None:
    """Compute the number of seeds (with each of which both compared configurations are run) with which the sign-flip
    test finds a true ``difference`` significant with a probability of 80 % after Holm's adjustment for ``comparisons``
    comparisons. ``spread`` is the standard deviation of the difference over seeds. Returns None if the difference is 0,
    or the number is above 10 000."""
    if difference == 0:
        return None
    least = pairs_to_accept(comparisons)
    if spread == 0:
        return least
    size = abs(difference) / spread
    numbers = range(least, MOST_SEEDS + 1)
    place = bisect.bisect_left(numbers, POWER, key=lambda pairs: power(size, pairs, comparisons))
    return numbers[place] if place < len(numbers) else None


def _finite(values: Sequence[float]) -> np.ndarray:
    array = np.asarray(values, dtype=np.float64)
    return array[np.isfinite(array)]


@cache
def _subsets(num: int) -> np.ndarray:
    """Return subsets of ``num`` values as rows of 0 and 1, fp64 [subsets, num]. For up to ``EXACT_PAIRS`` values these
    are all non-empty subsets; for more values they are 2^EXACT_PAIRS - 1 non-empty subsets, all drawn at random with a
    fixed seed, except the last one. The last row is always the set of all values."""
    if num <= EXACT_PAIRS:
        return (np.arange(1, 2**num)[:, None] >> np.arange(num) & 1).astype(np.float64)
    rows = np.random.default_rng(0).integers(0, 2, (2**EXACT_PAIRS - 1, num))
    rows[~rows.any(axis=1), 0] = 1
    rows[-1] = 1
    return rows.astype(np.float64)


@cache
def _standard_sums(pairs: int) -> np.ndarray:
    """Simulate studies whose paired differences are standard normal, to estimate the power of the test: as many studies
    as fit into 32 MB, but at most 4000. Returns the sum of the differences over each subset of the pairs, [studies,
    subsets] fp64."""
    studies = min(4000, 2**22 // 2**pairs)
    return np.random.default_rng(0).standard_normal((studies, pairs)) @ _subsets(pairs).T


def _p_values(sums: np.ndarray) -> np.ndarray:
    """Compute two-sided p-values [...] of the sign-flip test that the mean difference is 0 from the sums [..., subsets]
    of the paired differences over every subset of the pairs, of which the last is the sum over all pairs."""
    # Flipping the signs of a subset makes the mean at least as extreme in two cases: (1) the subset's sum is 0, or its
    # sign differs from that of the sum of all differences; (2) it has that sign and is at least as large. A subset is
    # in case 1 exactly if its complement is in case 2, so case 1 is counted, and doubled.
    total = sums[..., -1:]
    turned = np.where(total >= 0, sums, -sums)
    slack = 1e-9 * np.abs(sums).max(axis=-1, keepdims=True)
    count = (turned <= slack).sum(axis=-1) + 1  # the empty subset: nothing is flipped
    return np.minimum(1.0, 2 * count / (sums.shape[-1] + 1))


def _interval(sums: np.ndarray, pairs: int) -> tuple[float, float]:
    """Compute the 95 % confidence interval of the mean difference, that is, the true means that the sign-flip test does
    not reject, from the sums [subsets]. Returns lower and upper end, infinite if there are too few pairs."""
    means = np.sort(sums / _subsets(pairs).sum(axis=1))
    # number of subsets (the empty one included) at each end of the sorted means that p <= ALPHA allows
    rejected = math.floor(ALPHA / 2 * (len(means) + 1) + 1e-9)
    if rejected < 1:  # with five pairs or fewer, no mean is rejected
        return -math.inf, math.inf
    return float(means[rejected - 1]), float(means[-rejected])
