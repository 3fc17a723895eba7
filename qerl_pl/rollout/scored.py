"""Sampled and scored completions, and the tensors for training that are made of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from qerl_pl.common.types import Completion, Experience, Prompt
from qerl_pl.objective.advantages import AdvantageFunction, Baseline, group_advantages, has_signal
from qerl_pl.rewards.base import RewardTable
from qerl_pl.rollout.common import all_logprobs, padded_routes


@dataclass(frozen=True)
class ScoredBatch:
    """Scored completions of P prompts, G for each prompt: B = P * G rows, ordered by prompt."""

    prompts: tuple[Prompt, ...]
    """[B] prompts, one for each row."""
    prompt_texts: tuple[str, ...]
    """[B] the prompts decoded, special tokens included."""
    completions: tuple[Completion, ...]
    """[B] completions with their text."""
    table: RewardTable
    """Rewards of the B rows."""
    group_size: int
    """Completions per prompt, G."""
    in_loss: Tensor
    """[B] bool, True for rows that count in the loss: they have a score and were not filtered out."""
    has_signal: Tensor
    """[P] bool, True for groups (the completions of one prompt) from which the policy can learn: a completion that
    counts in the loss has an advantage other than 0."""

    @classmethod
    def of(
        cls,
        prompts: Sequence[Prompt],
        prompt_texts: Sequence[str],
        completions: Sequence[Completion],
        table: RewardTable,
        group_size: int,
        *,
        filter_truncated: bool = False,
        baseline: Baseline | AdvantageFunction = "centered",
        metric: str | None = None,
    ) -> ScoredBatch:
        """Build a batch of B completions, ``group_size`` for each prompt. A completion counts in the loss if it has a
        score and, with ``filter_truncated``, was not cut off at max_tokens. A group has a signal if a completion that
        counts has an advantage other than 0 by the rule ``baseline`` and, given ``metric``, the group's scores of the
        reward of this name differ."""
        finished = torch.tensor([completion.finished for completion in completions], dtype=torch.bool)
        in_loss = table.scored & (finished | (not filter_truncated))
        grouped = (values.view(-1, group_size) for values in (table.total, table.scored, in_loss))
        rewards, scored, counts = grouped
        # "centered" advantages are exactly 0 for the rows whose advantage is 0 with any built-in rule
        advantages = group_advantages(rewards, scored, baseline if callable(baseline) else "centered")
        signal = (counts & (advantages != 0)).any(dim=1)
        if metric is not None:
            scores = table.components[metric].view(-1, group_size)
            signal &= has_signal(scores, ~scores.isnan())
        return cls(tuple(prompts), tuple(prompt_texts), tuple(completions), table, group_size, in_loss, signal)

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

    def group_numbers(self) -> dict[str, list[float]]:
        """Return, by name, statistics of the groups' lengths and rewards and of their shares of finished and of
        distinct completions. Each has one value per group, but "mean reward" has none for a group in which no
        completion was scored."""
        size, rows = self.group_size, self.completions
        groups = [rows[first : first + size] for first in range(0, len(rows), size)]
        rewards = zip(self.rewards, self.scored, strict=True)
        return {
            "mean length of completions": [sum(len(row.tokens) for row in group) / size for group in groups],
            "log of the spread of lengths in groups": [
                math.log1p(statistics.pstdev(len(row.tokens) for row in group)) for group in groups
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
            self.in_loss[rows],
            self.has_signal[groups],
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
            torch.cat([self.in_loss, other.in_loss]),
            torch.cat([self.has_signal, other.has_signal]),
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


def collate(
    prompts: Sequence[Prompt], completions: Sequence[Completion], *, scored: Tensor, advantages: Tensor, in_loss: Tensor
) -> Experience:
    """Build the training tensors of B rows, each a prompt followed by a completion, padded on the right. For each row,
    ``scored`` [B] bool says whether the completion has a score, ``advantages`` [B] has its advantage, and ``in_loss``
    [B] bool says whether it counts in the loss. Raises ValueError if the five arguments do not all have B entries, or
    if a completion has more or fewer tokens than log-probabilities."""
    if not len(prompts) == len(completions) == len(scored) == len(advantages) == len(in_loss):
        raise ValueError(
            f"{len(prompts)} prompts, {len(completions)} completions, {len(scored)} scores, {len(advantages)} "
            f"advantages and {len(in_loss)} flags; expected equal numbers"
        )
    for row, completion in enumerate(completions):
        if len(completion.tokens) != len(completion.logprobs):
            raise ValueError(f"row {row} has {len(completion.tokens)} tokens and {len(completion.logprobs)} logprobs")
    rows = [
        torch.from_numpy(np.array(prompt.tokens + completion.tokens, dtype=np.int64))
        for prompt, completion in zip(prompts, completions, strict=True)
    ]
    tokens = pad_sequence(rows, batch_first=True)  # [B, S]; padding is token 0
    starts, lengths = torch.tensor([len(prompt.tokens) for prompt in prompts]), torch.tensor([len(row) for row in rows])
    column = torch.arange(tokens.shape[1])
    sampled = (column >= starts.unsqueeze(1)) & (column < lengths.unsqueeze(1))
    logprobs = all_logprobs(completions)
    routes = [completion.routes for completion in completions if completion.routes is not None]
    return Experience(
        tokens=tokens,
        lengths=lengths,
        mask=sampled & in_loss.unsqueeze(1),
        sampled=sampled,
        sampler_logprobs=torch.zeros(tokens.shape).masked_scatter(sampled, logprobs),
        scored=scored,
        advantages=advantages,
        routes=padded_routes(routes),
    )
