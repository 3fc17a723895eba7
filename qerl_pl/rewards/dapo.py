"""DAPO's rule: the answer is the completion's last ``Answer: ...`` line."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from qerl_pl.rewards.math import judge_spans
from qerl_pl.rewards.verdict import Verdict, no_progress
from qerl_pl.rewards.verifier import Verifier
from qerl_pl.types import Completion, Prompt

WINDOW = 300  # characters at the end of a completion that the released rule looks at
_LINE = re.compile(r"answer\s*\**\s*:[ \t*]*([^\n]+)", re.IGNORECASE)


class DapoAnswer:
    """1 if the last ``Answer: ...`` line is mathematically equal to the prompt's answer; else 0.

    The rule released with DAPO (arXiv 2503.14476; verl's ``math_dapo``) looks for the line in the last 300 characters
    and compares normalised strings; wrong is -1. Here the comparison is ``MathAnswer``'s, which accepts more forms of
    an equal answer, and wrong is 0, which leaves advantages that are normalised by their group's std as they were.

    Args:
        num_workers: processes; null for one a core, at most 4.
        time_limit: seconds of processor time a row.
    """

    def __init__(self, num_workers: int | None = None, time_limit: float = 3.0) -> None:
        self.verifier = Verifier(num_workers, time_limit)

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float | None]:
        texts, answers = [each.text for each in completions], [prompt.answer for prompt in prompts]
        return [verdict.score for verdict in self.judge(texts, answers)]

    def judge(
        self, texts: Sequence[str], answers: Sequence[str], progress: Callable[[int], object] = no_progress
    ) -> list[Verdict]:
        """Judge completions' texts against the known answers; ``progress`` is told how many rows just got done."""
        return judge_spans(self.verifier, [last_answer_line(text) for text in texts], answers, progress)

    def close(self) -> None:
        """End the worker processes. The next row starts new ones."""
        self.verifier.close()


def last_answer_line(text: str) -> str | None:
    """The rest of the line after the last ``Answer:`` near the end of the text."""
    found = _LINE.findall(text[-WINDOW:])
    return found[-1].strip() if found else None
