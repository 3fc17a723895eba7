"""Rewards for the format of a completion, which do not look at the answer."""

import re
from collections.abc import Callable, Sequence

from qerl_pl.common.types import Completion, Prompt
from qerl_pl.rewards.base import WeightedReward
from qerl_pl.rewards.thoughts import CLOSE, OPEN, assistant_turn, opening_at_the_end

_TAG = re.compile(r"</?(?:think|answer)>")


def think_answer_format(prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float | None]:
    """Score 1 for a completion of the form ``<think>...</think><answer>...</answer>`` and nothing else, otherwise 0.

    Each tag must occur once and in this order. There must be text within both pairs of tags, and only white space
    before, between and after them. If the chat template ends the prompt with ``<think>``, this counts as the first tag.
    Tokens by which a model family marks its reasoning, such as ``[THINK]``, count as ``<think>`` and ``</think>``;
    other spellings, such as ``<Think>``, do not.
    """
    pairs = zip(prompts, completions, strict=True)
    return [float(_is_think_answer(assistant_turn(prompt, completion))) for prompt, completion in pairs]


# Pairs of reasoning and answer with few characters in common, so that one stop string hardly occurs in all of them.
EXAMPLES = (("It follows.", "1"), ("Also", "7"), ("x y", "b"))


def check_format_can_be_met(
    rewards: Sequence[WeightedReward], prompts: Sequence[Prompt], as_sampled: Callable[[str], str]
) -> None:
    """Raise ValueError before training if ``think_answer_format`` could never give 1, because stop strings or decoding
    change every completion of its form. ``as_sampled`` maps a text that the policy writes to the text that rewards get
    after sampling and decoding."""
    for term in rewards:
        if term.reward is not think_answer_format or term.weight == 0:
            continue
        for prompt in prompts[:1]:
            opened = "" if opening_at_the_end(prompt.text) else OPEN
            texts = [
                f"{opened}{thought}{CLOSE}<answer>{answer}</answer>"
                for thought, answer in (*EXAMPLES, ("So.", prompt.answer))
            ]
            texts = list(map(as_sampled, texts))  # a stop string may occur in one of them
            rows = [Completion((), (), True, text=text) for text in texts]
            if not any(think_answer_format([prompt] * len(rows), rows)):
                raise ValueError(
                    f"reward {term.name!r} can only give 0: of a completion in its format, rewards would see "
                    f"{texts[0]!r}; change data.stop or the reward"
                )


def _is_think_answer(text: str) -> bool:
    tags = list(_TAG.finditer(text))
    if [tag.group() for tag in tags] != ["<think>", "</think>", "<answer>", "</answer>"]:
        return False
    ends = [0, *(tag.end() for tag in tags)]
    starts = [*(tag.start() for tag in tags), len(text)]
    before, thought, between, answer, after = (text[end:start].strip() for end, start in zip(ends, starts, strict=True))
    return bool(thought and answer) and not (before or between or after)
