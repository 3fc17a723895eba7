"""The result of judging one answer: a score and its reason."""

from typing import Literal, NamedTuple, get_args

Cause = Literal["known_answer", "hang", "crash", "memory", "unsaid"]
"""Cause of an unscored row.

"known_answer": the known answer cannot be read. "hang", "crash", "memory": reading the known answer took too long,
ended the worker process twice, or took too much memory. (If this happens only with the completion's answer, the score
is 0.) "unsaid": the reward returned None without a reason.
"""
CAUSES: tuple[Cause, ...] = get_args(Cause)


class Verdict(NamedTuple):
    """The score of one row, with its reason."""

    score: float | None
    """1 for a correct answer, 0 for a wrong or missing one, None for an unscored completion, which is not trained
    on."""
    reason: str
    """Reason of the score for people, one line: the two values that were compared, or what is missing."""
    cause: Cause | None = None
    """Cause of an unscored row."""


def no_progress(count: int) -> None:
    """Ignore reports of progress."""
