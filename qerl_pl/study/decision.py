"""Decide which comparisons of a study are accepted, and say how many seeds that needs."""

from __future__ import annotations

import math
from collections.abc import Sequence

ALPHA = 0.05
"""Error rate of a study over all comparisons that decide it."""


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values by Holm's step-down method.

    Rejecting where the adjusted value is at most alpha has a family-wise error rate of at most alpha. A p-value of NaN
    stays NaN, and does not count as a test.
    """
    adjusted = [math.nan] * len(p_values)
    order = sorted((place for place, p in enumerate(p_values) if p == p), key=p_values.__getitem__)
    least = 0.0
    for rank, place in enumerate(order):
        least = max(least, min(1.0, (len(order) - rank) * p_values[place]))
        adjusted[place] = least
    return adjusted


def smallest_p(pairs: int) -> float:
    """Return the smallest p-value that the sign-flip test of so many pairs can give, whatever the differences."""
    return min(1.0, 2.0 ** (1 - pairs))


def pairs_to_accept(comparisons: int) -> int:
    """Return the number of pairs below which no comparison can be accepted after Holm's adjustment."""
    pairs = 1
    while comparisons * smallest_p(pairs) > ALPHA:
        pairs += 1
    return pairs
