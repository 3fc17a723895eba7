"""Rewards that compare a completion's answer with the known one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from qerl_pl.rewards.answers import Marker, marked_answer
from qerl_pl.rewards.numbers import last_number, parse_number
from qerl_pl.rewards.verdict import Verdict
from qerl_pl.types import Completion, Prompt


class NumericAnswer:
    """1 if the last marked answer is the prompt's number, exactly; else 0. For GSM8K and its like.

    Units, currency, separators and ways of writing do not matter (``numbers.parse_number`` lists them); two numbers in
    the span are no answer. A prompt whose own answer is not a number (or GSM8K's ``... #### 72``) is unscored.

    Args:
        marker: what marks an answer: the ``<answer>`` tag, ``\\boxed{}``, ``####``, or any of the three.
        fallback: what counts when nothing readable is marked: nothing, or the last number of the text. The latter
            agrees with how people label free-form solutions, but teaches a policy no format.

    Raises:
        ValueError: ``marker`` or ``fallback`` is not one of the above.
    """

    def __init__(self, marker: Marker = "answer", fallback: Literal["none", "last_number"] = "none") -> None:
        if marker not in get_args(Marker):
            raise ValueError(f"marker is {marker!r}; expected one of {', '.join(get_args(Marker))}")
        if fallback not in ("none", "last_number"):
            raise ValueError(f"fallback is {fallback!r}; expected 'none' or 'last_number'")
        self.marker: Marker = marker
        self.fallback = fallback

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float | None]:
        rows = zip(completions, prompts, strict=True)
        return [self.judge(completion.text, prompt.answer).score for completion, prompt in rows]

    def judge(self, text: str, answer: str) -> Verdict:
        """Judge one completion's text against the known answer."""
        gold = parse_number(answer.rpartition("####")[2])
        if gold is None:
            return Verdict(None, f"the known answer {_short(answer)} is not a number")
        span = marked_answer(text, self.marker)
        found = None if span is None else parse_number(span)
        if found is None and self.fallback == "last_number":
            found = last_number(text if span is None else span)
        if found is None:
            return Verdict(0.0, "no marked answer" if span is None else f"the answer {_short(span)} is not one number")
        right = found.equals(gold)
        return Verdict(float(right), f"{found} {'equals' if right else 'is not'} {gold}")


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")
