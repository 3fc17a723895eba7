"""The result of judging one answer: a score and its reason."""

from typing import Literal, NamedTuple, get_args

Cause = Literal["known_answer", "hang", "crash", "memory", "unsaid"]
"""Cause of an unscored row: the known answer cannot be read; it alone took too long, ended its process twice, took too
much memory (an answer that does so for a readable one is 0); a reward returned None and does not say."""
CAUSES: tuple[Cause, ...] = get_args(Cause)


class Verdict(NamedTuple):
    """The judgement of one row."""

    score: float | None
    """1 right, 0 wrong or absent, None unscored: the row says nothing about the policy."""
    reason: str
    """One line for people: what was compared, or what is missing."""
    cause: Cause | None = None
    """Cause of an unscored row."""


def no_progress(count: int) -> None:
    """Stands for a progress bar where nobody looks."""
