"""What judging one answer gives: a score and why."""

from typing import Literal, NamedTuple, get_args

Cause = Literal["known_answer", "hang", "crash", "memory", "unsaid"]
"""Why a row is unscored: the known answer cannot be read; it alone took too long, ended its process twice, took too
much memory (an answer that does so for a readable one is 0); a reward returned None and does not say."""
CAUSES: tuple[Cause, ...] = get_args(Cause)


class Verdict(NamedTuple):
    """The judgement of one row."""

    score: float | None
    """1 right, 0 wrong or absent, None unscored: the row says nothing about the policy."""
    reason: str
    """One line for people: what was compared, or what is missing."""
    cause: Cause | None = None
    """Of an unscored row."""


def no_progress(count: int) -> None:
    """Stands for a progress bar where nobody looks."""
