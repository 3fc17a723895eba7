"""The result of judging one answer: a score and its reason."""

from typing import Literal, NamedTuple, get_args

# Causes for which a row is unscored: its known answer cannot be read; reading the known answer took too long, ended the
# worker process twice, or took too much memory (if the completion's answer is the reason, the score is 0 instead); or
# the reward returned None.
Cause = Literal["known_answer", "hang", "crash", "memory", "unsaid"]
CAUSES: tuple[Cause, ...] = get_args(Cause)


class Verdict(NamedTuple):
    """The score of one row, with its reason."""

    score: float | None
    """1 for a correct answer, 0 for a wrong or missing one, None for an unscored row, which is not trained on."""
    reason: str
    """Reason of the score, for people to read, in one line: the two values that were compared, or what is missing."""
    cause: Cause | None = None
    """Cause for which the row is unscored."""


def no_progress(count: int) -> None:
    """Do nothing; the default where a function that takes reports of progress may be passed."""
