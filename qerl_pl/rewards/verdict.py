"""What judging one answer gives: a score and why."""

from typing import NamedTuple


class Verdict(NamedTuple):
    """The judgement of one row."""

    score: float | None
    """1 right, 0 wrong or absent, None unscored: the row says nothing about the policy."""
    reason: str
    """One line for people: what was compared, or what is missing."""


def no_progress(count: int) -> None:
    """Stands for a progress bar where nobody looks."""
