"""Rewards for the format of a completion, which do not look at the answer."""

from __future__ import annotations

import re
from collections.abc import Sequence

from qerl_pl.common.types import Completion, Prompt
from qerl_pl.rewards.turn import assistant_turn

_TAG = re.compile(r"</?(?:think|answer)>")


def think_answer_format(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float | None]:
    """Score 1 for ``<think>...</think><answer>...</answer>`` and nothing else, else 0.

    Each tag must occur once and in this order, both spans must hold more than white space, and only white space may be
    before, between and after them. If the chat template ends the prompt with ``<think>``, this counts as the first tag.
    """
    pairs = zip(prompts, completions, strict=True)
    return [float(_is_think_answer(assistant_turn(prompt, completion))) for prompt, completion in pairs]


def _is_think_answer(text: str) -> bool:
    tags = list(_TAG.finditer(text))
    if [tag.group() for tag in tags] != ["<think>", "</think>", "<answer>", "</answer>"]:
        return False
    ends = [0, *(tag.end() for tag in tags)]
    starts = [*(tag.start() for tag in tags), len(text)]
    before, thought, between, answer, after = (text[end:start].strip() for end, start in zip(ends, starts, strict=True))
    return bool(thought and answer) and not (before or between or after)
