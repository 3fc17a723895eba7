"""Sampled and scored completions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qerl_pl.common.types import Completion, Prompt
from qerl_pl.objective.advantages import group_advantages, has_signal
from qerl_pl.rewards.base import RewardTable


@dataclass(frozen=True)
class ScoredBatch:
    """P prompts with G completions each: B = P * G rows, ordered by prompt."""

    prompts: tuple[Prompt, ...]
    """[B] the prompt of each row."""
    prompt_texts: tuple[str, ...]
    """[B] the prompts decoded, special tokens included."""
    completions: tuple[Completion, ...]
    """[B] completions with their text."""
    table: RewardTable
    """Rewards of the B rows."""
    group_size: int
    """Completions per prompt, G."""

    @property
    def num_groups(self) -> int:
        """Number of prompts, P."""
        return len(self.completions) // self.group_size

    @property
    def rewards(self) -> Tensor:
        """Total rewards, [P, G] fp32; 0 for rows without a score."""
        return self.table.total.view(-1, self.group_size)

    @property
    def scored(self) -> Tensor:
        """Mask of rows with a score, [P, G] bool."""
        return self.table.scored.view(-1, self.group_size)

    def in_loss(self, *, filter_truncated: bool) -> Tensor:
        """Return [B] bool, True for rows that count in the loss: they have a score and, if ``filter_truncated`` is set,
        were not cut off at max_tokens."""
        finished = torch.tensor([completion.finished for completion in self.completions], dtype=torch.bool)
        return self.table.scored & (finished | (not filter_truncated))

    def signal(self, *, filter_truncated: bool, metric: str | None = None) -> Tensor:
        """Find the groups with a signal, that is, in which a row that counts in the loss has an advantage other than 0.

        Args:
            filter_truncated: see ``in_loss``.
            metric: name of a reward whose scores must also differ within the group; None: advantages alone decide.

        Returns:
            [P] bool, True for groups with a signal.
        """
        counts = self.in_loss(filter_truncated=filter_truncated).view(-1, self.group_size)
        # these advantages are exactly 0 for the rows whose advantage is 0 with every baseline
        centered = group_advantages(self.rewards, self.scored, "centered")
        found = (counts & (centered != 0)).any(dim=1)
        if metric is not None:
            scores = self.table.components[metric].view(-1, self.group_size)
            found &= has_signal(scores, ~scores.isnan())
        return found

    def group_numbers(self) -> dict[str, list[float]]:
        """Return numbers of each group by name: mean length and the logarithm of its spread, share of finished
        completions, mean reward (of groups with a score only) and share of distinct completions."""
        size, rows = self.group_size, self.completions
        groups = [rows[first : first + size] for first in range(0, len(rows), size)]
        rewards = zip(self.rewards, self.scored, strict=True)
        return {
            "mean length of completions": [sum(len(row.tokens) for row in group) / size for group in groups],
            "log of the spread of lengths in groups": [
                _log_spread([len(row.tokens) for row in group]) for group in groups
            ],
            "share of finished completions": [sum(row.finished for row in group) / size for group in groups],
            "mean reward": [reward[scored].double().mean().item() for reward, scored in rewards if scored.any()],
            "share of distinct completions": [len({row.tokens for row in group}) / size for group in groups],
        }

    def select(self, groups: Tensor) -> ScoredBatch:
        """Return a batch of the N groups with the given indices, [N] int64."""
        rows = (groups.unsqueeze(1) * self.group_size + torch.arange(self.group_size)).flatten()
        picked = rows.tolist()
        return ScoredBatch(
            tuple(self.prompts[row] for row in picked),
            tuple(self.prompt_texts[row] for row in picked),
            tuple(self.completions[row] for row in picked),
            RewardTable(
                self.table.total[rows],
                self.table.scored[rows],
                {name: scores[rows] for name, scores in self.table.components.items()},
                {name: tuple(verdicts[row] for row in picked) for name, verdicts in self.table.verdicts.items()},
                self.table.only_logged,
                self.table.metrics,
            ),
            self.group_size,
        )

    def __add__(self, other: ScoredBatch) -> ScoredBatch:
        """Concatenate two batches with the same group size and rewards."""
        mine, theirs = self.table, other.table
        return ScoredBatch(
            self.prompts + other.prompts,
            self.prompt_texts + other.prompt_texts,
            self.completions + other.completions,
            RewardTable(
                torch.cat([mine.total, theirs.total]),
                torch.cat([mine.scored, theirs.scored]),
                {name: torch.cat([scores, theirs.components[name]]) for name, scores in mine.components.items()},
                {name: verdicts + theirs.verdicts[name] for name, verdicts in mine.verdicts.items()},
                mine.only_logged,
                {name: (*mine.metrics.get(name, ()), *values) for name, values in theirs.metrics.items()}
                | {name: values for name, values in mine.metrics.items() if name not in theirs.metrics},
            ),
            self.group_size,
        )

    def rows(self) -> list[dict[str, Any]]:
        """Return one record per completion, with values that can be written as JSON."""
        return [
            {
                "question": self.prompts[row].messages[-1]["content"] if self.prompts[row].messages else "",
                "prompt": self.prompt_texts[row],
                "completion": completion.text,
                "answer": self.prompts[row].answer,
                "reward": self.table.total[row].item() if self.table.scored[row] else None,
                "rewards": {
                    name: None if scores[row].isnan() else scores[row].item()
                    for name, scores in self.table.components.items()
                },
                "reasons": {name: verdicts[row].reason for name, verdicts in self.table.verdicts.items()},
                "num_tokens": len(completion.tokens),
                "finished": completion.finished,
            }
            for row, completion in enumerate(self.completions)
        ]


def _log_spread(values: Sequence[int]) -> float:
    """Return log(1 + standard deviation)."""
    mean = sum(values) / len(values)
    return math.log1p(math.sqrt(sum((value - mean) ** 2 for value in values) / len(values)))
