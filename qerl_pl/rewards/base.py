"""What a reward is, and the weighted sum of several."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import FunctionType, NoneType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from qerl_pl.types import Completion, Prompt


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
    components = {}
    for term in rewards:
        scores = _scores(term, prompts, completions)
        present = ~scores.isnan()
        components[term.name] = scores
        scored &= present
        total += term.weight * torch.where(present, scores, 0.0)
    return RewardTable(torch.where(scored, total, 0.0), scored, components)


def _scores(term: WeightedReward, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> Tensor:
    """[B] fp32, NaN where unscored."""
    scores = term.reward(prompts, completions)
    if len(scores) != len(prompts):
        raise ValueError(f"reward {term.name!r} returned {len(scores)} scores for {len(prompts)} rows")
    for row, score in enumerate(scores):
        if score is not None and not math.isfinite(score):
            raise ValueError(f"reward {term.name!r} scored row {row} as {score}; expected a finite number or None")
    return torch.tensor([math.nan if score is None else score for score in scores], dtype=torch.float32)


def describe(reward: Reward) -> str:
    """Import path of a reward and, of a class, its settings: equal for equal rewards, in every process."""
    owner = reward if isinstance(reward, FunctionType) else type(reward)
    plain = (str, int, float, bool, NoneType)
    settings = {name: value for name, value in vars(reward).items() if isinstance(value, plain)}
    return f"{owner.__module__}.{owner.__qualname__} {settings}"
