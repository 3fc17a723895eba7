"""What a reward is, and the weighted sum of several."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from qerl_pl.rewards.verdict import CAUSES, Cause, Verdict, no_progress
from qerl_pl.types import Completion, Prompt


@runtime_checkable
class Judge(Protocol):
    """A reward that also says why. Where a reward has this method, it is called, and ``__call__`` is not."""

    def judge(
        self, texts: Sequence[str], answers: Sequence[str], progress: Callable[[int], object] = no_progress
    ) -> list[Verdict]:
        """A verdict a row; ``progress`` is told how many rows just got done."""
        ...


class Reward(Protocol):
    """Scores completions. A class (settings in its constructor) or a plain function: YAML takes both.

    The annotations of ``__call__`` have to be repeated as they stand here: they are how YAML tells a reward.
    """

    def __call__(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float | None]:
        """One score a row; ``None`` means unscored: the row is left out of the loss and counted, never taken as 0.

        Args:
            prompts: [B] the prompt of each row, repeated for the rows of a group.
            completions: [B] with their text filled in.
        """
        ...


@dataclass(frozen=True)
class WeightedReward:
    """One term of the sum: YAML writes it as ``{name: answer, weight: 1.0, reward: CLASS_OR_FUNCTION}``.

    Args:
        name: what the component is logged as.
        reward: what scores it.
        weight: its factor in the sum; 0 only logs it.

    Raises:
        ValueError: the name is empty or the weight is not finite.
    """

    name: str
    reward: Reward
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a reward's name is empty; expected the name to log it under, e.g. 'answer'")
        if not math.isfinite(self.weight):
            raise ValueError(f"the weight of reward {self.name!r} is {self.weight}; expected a finite number")


class RewardTable(NamedTuple):
    """The scores of one batch."""

    total: Tensor
    """[B] fp32, weighted sum of the components, 0 on unscored rows."""
    scored: Tensor
    """[B] bool, False where any component is unscored."""
    components: dict[str, Tensor]
    """Name to [B] fp32, before weighting, NaN where that component is unscored."""
    verdicts: dict[str, tuple[Verdict, ...]]
    """Name to [B] scores with their reasons."""

    def causes(self) -> dict[Cause, int]:
        """How many scores are missing, by cause; every cause is there."""
        counts = Counter(verdict.cause for verdicts in self.verdicts.values() for verdict in verdicts)
        return {cause: counts[cause] for cause in CAUSES}

    def common_reason(self) -> str:
        """The reason that most of the missing scores have; there has to be one."""
        missing = (verdict for verdicts in self.verdicts.values() for verdict in verdicts if verdict.score is None)
        return Counter(verdict.reason for verdict in missing).most_common(1)[0][0]


def score_rewards(
    rewards: Sequence[WeightedReward], prompts: Sequence[Prompt], completions: Sequence[Completion]
) -> RewardTable:
    """Score a batch with every component.

    Raises:
        ValueError: there is no reward, two share a name, prompts and completions differ in number, or a reward returns
            too few or too many scores, or one that is not finite.
    """
    if not rewards:
        raise ValueError("rewards is empty; expected at least one reward")
    repeated = [name for name, count in Counter(reward.name for reward in rewards).items() if count > 1]
    if repeated:
        raise ValueError(f"several rewards are named {repeated[0]!r}; give each its own name")
    if len(prompts) != len(completions):
        raise ValueError(f"{len(prompts)} prompts for {len(completions)} completions; expected one prompt a row")

    total = torch.zeros(len(prompts), dtype=torch.float32)
    scored = torch.ones(len(prompts), dtype=torch.bool)
    components, verdicts = {}, {}
    for term in rewards:
        verdicts[term.name] = _verdicts(term, prompts, completions)
        found = [math.nan if verdict.score is None else verdict.score for verdict in verdicts[term.name]]
        scores = torch.tensor(found, dtype=torch.float32)
        present = ~scores.isnan()
        components[term.name] = scores
        scored &= present
        total += term.weight * torch.where(present, scores, 0.0)
    return RewardTable(torch.where(scored, total, 0.0), scored, components, verdicts)


def judge_rows(
    reward: Reward,
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    progress: Callable[[int], object] = no_progress,
) -> list[Verdict]:
    """The verdicts of any reward: with reasons where it has some."""
    if isinstance(reward, Judge):
        return reward.judge([each.text for each in completions], [prompt.answer for prompt in prompts], progress)
    scores = reward(prompts, completions)
    progress(len(prompts))
    return [
        Verdict(None, "the reward does not say why", "unsaid") if score is None else Verdict(score, "")
        for score in scores
    ]


def _verdicts(
    term: WeightedReward, prompts: Sequence[Prompt], completions: Sequence[Completion]
) -> tuple[Verdict, ...]:
    verdicts = judge_rows(term.reward, prompts, completions)
    if len(verdicts) != len(prompts):
        raise ValueError(f"reward {term.name!r} returned {len(verdicts)} scores for {len(prompts)} rows")
    for row, (score, *_) in enumerate(verdicts):
        if score is not None and not math.isfinite(score):
            raise ValueError(f"reward {term.name!r} scored row {row} as {score}; expected a finite number or None")
    return tuple(verdicts)
