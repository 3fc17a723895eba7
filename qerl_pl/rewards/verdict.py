"""The result of judging one answer: a score and its reason."""

from typing import Literal, NamedTuple, get_args

# Causes why a completion has no score. "known_answer": the known answer of the data set cannot be read. "hang",
# "crash", "memory": reading the known answer took too long, ended the worker process twice, or took too much memory (if
# the completion's answer causes this, the score is 0 instead). "unsaid": the reward returned None.
Cause = Literal["known_answer", "hang", "crash", "memory", "unsaid"]
CAUSES: tuple[Cause, ...] = get_args(Cause)


class Verdict(NamedTuple):
    """The score of one row, with its reason."""

    score: float | None
    """1 for a correct answer, 0 for a wrong or missing one; None: the completion cannot be scored, and is left out of
    the loss."""
    reason: str
    """Reason of the score, for people to read, in one line: the two values that were compared, or what is missing."""
    cause: Cause | None = None
    """Cause why there is no score; None if there is one."""


def no_progress(count: int) -> None:
    """Do nothing. This is the default for arguments that are called with the number of finished rows."""
