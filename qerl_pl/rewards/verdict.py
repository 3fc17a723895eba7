"""The result of judging one answer: a score and its reason."""

from typing import Literal, NamedTuple, get_args

# Why a row is unscored: its known answer cannot be read; reading that took too long, ended the worker process twice, or
# took too much memory (if only the completion's answer does so, the score is 0); or the reward returned None.
Cause = Literal["known_answer", "hang", "crash", "memory", "unsaid"]
CAUSES: tuple[Cause, ...] = get_args(Cause)


class Verdict(NamedTuple):
    """The score of one row, with its reason."""

    score: float | None
    """1 for a correct answer, 0 for a wrong or missing one, None for an unscored row, which is not trained on."""
    reason: str
    """Reason of the score for people, one line: the two values that were compared, or what is missing."""
    cause: Cause | None = None
    """Cause of an unscored row."""


def no_progress(count: int) -> None:
    """Ignore reports of progress."""
