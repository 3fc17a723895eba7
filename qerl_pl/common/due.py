"""Decide which rollouts get the checks that take long."""

from __future__ import annotations

EARLY = 4
"""Rollouts at the start of a run that all get them, because most faults are there from the start."""


def is_due(index: int, every: int) -> bool:
    """Return whether the rollout of this index (0 is the first of a run) is one of the first ``EARLY`` ones, or one of
    every ``every`` after them."""
    return index < EARLY or index % every == 0
