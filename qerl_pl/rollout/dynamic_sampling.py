"""Dynamic sampling (DAPO): replace groups of completions whose advantages are all 0 by groups of further prompts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import torch
from torch import Tensor

from qerl_pl.common import ranks
from qerl_pl.common.checks import CheckFailed
from qerl_pl.common.types import Prompt
from qerl_pl.rollout.scored import ScoredBatch


@dataclass(frozen=True)
class DynamicSampling:
    """Sample further prompts until the batch is full of groups with a signal (arXiv 2503.14476, section 3.2).

    A group (the completions of one prompt) has a signal if one of its rows that counts in the loss has an advantage
    other than 0. The prompts of a rollout form one sequence that depends only on the run's seed and the rollout index:
    first the prompts of the batch, then further prompts. The batch that is trained on consists of the first groups with
    a signal in this sequence, over all ranks. It therefore does not depend on how many prompts are sampled at once or
    on the number of ranks, and a resumed run has no state to restore. Groups are sent between ranks so that all ranks
    train on equally many, or one more.

    Args:
        max_refills: largest number of times that further prompts are sampled for one rollout.
        when_short: what to do if the batch is not full after ``max_refills``: stop the run ("error"), or train on fewer
            groups ("smaller").
        metric: name of a reward whose scores must also differ within a group, such as the reward for the right answer,
            so that some completions of the group are right and some wrong (0 < right < G, equation 11). null: only the
            advantages decide whether a group has a signal.
        oversample: factor by which the estimated number of prompts needed to fill the batch is multiplied. The first
            estimate is the batch size; later ones use the share of groups with a signal so far. If 30 % of groups have
            a signal and a batch has 8 prompts, oversample 1 takes 4.0 sequential rounds of sampling and 29 groups on
            average, oversample 2 takes 2.2 rounds and 32 groups, oversample 3 takes 1.6 rounds and 36 groups.

    Raises:
        ValueError: ``max_refills`` is less than 1, or ``oversample`` is not 1 to 100.
    """

    max_refills: int = 8
    when_short: Literal["error", "smaller"] = "smaller"
    metric: str | None = None
    oversample: float = 1.0

    def __post_init__(self) -> None:
        if self.max_refills < 1:
            raise ValueError(
                f"model.dynamic_sampling.max_refills is {self.max_refills}; expected at least 1 (null: "
                "no dynamic sampling)"
            )
        if not 1 <= self.oversample <= 100:
            raise ValueError(f"model.dynamic_sampling.oversample is {self.oversample}; expected 1 to 100")

    def fill(
        self,
        prompts: Sequence[Prompt],
        more_prompts: Iterator[Prompt],
        sample: Callable[[Sequence[Prompt]], ScoredBatch],
        count: Callable[[ScoredBatch], int],
    ) -> tuple[ScoredBatch, int]:
        """Sample until the batch is full of groups with a signal, ``max_refills`` is reached, or prompts run out.

        Collective: every rank must call it, and all ranks take the same decisions.

        Args:
            prompts: this rank's prompts of the batch, at least one and equally many on every rank.
            more_prompts: further prompts, the same on every rank.
            sample: function that samples and scores completions of the given prompts of this rank.
            count: function that counts the groups with a signal over all ranks.

        Returns:
            All groups that this rank sampled, and the number of times that further prompts were sampled. Group j of
            rank r of W belongs to prompt r + j * W of the rollout's sequence of prompts.
        """
        rank, num_ranks = ranks.rank(), ranks.num_ranks()
        batch_size = num_sampled = len(prompts) * num_ranks
        most = math.ceil(self.oversample * batch_size)

        def next_share(size: int) -> tuple[list[Prompt], int]:
            chunk = list(islice(more_prompts, size))
            return [prompt for place, prompt in enumerate(chunk, num_sampled) if place % num_ranks == rank], len(chunk)

        own, num_more = next_share(most - batch_size)
        num_sampled += num_more
        evaluation = sample([*prompts, *own])
        for refill in range(self.max_refills):
            found = count(evaluation)
            if found >= batch_size:
                return evaluation, refill
            size = math.ceil(self.oversample * (batch_size - found) * num_sampled / found) if found else most
            own, num_more = next_share(min(size, most))
            if not num_more:
                return evaluation, refill
            num_sampled += num_more
            if own:
                evaluation += sample(own)
        return evaluation, self.max_refills

    def choose(
        self, evaluation: ScoredBatch, signal: Tensor, *, batch_size: int, may_move: bool = True
    ) -> ScoredBatch | None:
        """Choose the first ``batch_size`` groups with a signal among those of all ranks, and return the ones that this
        rank trains on. Every rank must call this.

        Args:
            evaluation: this rank's groups, as returned by ``fill``.
            signal: [P] bool, True for groups with a signal.
            batch_size: groups to choose over all ranks.
            may_move: whether groups may be sent to another rank than the one that sampled them.

        Returns:
            This rank's groups to train on; None if it has none.

        Raises:
            CheckFailed: there are fewer than ``batch_size`` groups with a signal, and ``when_short`` is "error".
        """
        shares, rank = ranks.gather_values(signal.tolist()), ranks.rank()
        found = sorted(
            own + index * len(shares) for own, flags in enumerate(shares) for index, flag in enumerate(flags) if flag
        )
        places = found[:batch_size]
        if len(places) < batch_size and self.when_short == "error":
            raise CheckFailed(
                f"dynamic sampling found {len(places)} groups with a signal among {sum(map(len, shares))}, and a batch "
                f"needs {batch_size}: the problems are too easy or too hard for the policy; change the data, raise "
                "model.dynamic_sampling.max_refills, or set when_short to smaller"
            )
        sampled_by = [place % len(shares) for place in places]
        trained_by = balanced(sampled_by, len(shares)) if may_move else sampled_by

        def groups(given: bool) -> list[int]:
            """List the chosen groups that this rank sampled: those that it sends to other ranks if ``given``, and those
            that it trains on itself if not."""
            moves = zip(places, sampled_by, trained_by, strict=True)
            return [place // len(shares) for place, old, new in moves if old == rank and (new != old) == given]

        parts = [evaluation.select(torch.tensor(groups(given=False)))] if groups(given=False) else []
        if trained_by != sampled_by:
            given = groups(given=True)
            offered = ranks.gather_values(evaluation.select(torch.tensor(given)) if given else None)
            taken: Counter[int] = Counter()
            for old, new in zip(sampled_by, trained_by, strict=True):
                part = offered[old]
                if old == new or part is None:
                    continue
                if new == rank:
                    parts.append(part.select(torch.tensor([taken[old]])))
                taken[old] += 1
        return sum(parts[1:], parts[0]) if parts else None


def balanced(owners: Sequence[int], num_ranks: int) -> list[int]:
    """Assign each group to a rank, such that the ranks' counts differ by at most one and the fewest groups move.

    Args:
        owners: rank that has each group now.
        num_ranks: number of ranks W.

    Returns:
        The new rank of each group.
    """
    counts = Counter(owners)
    base, extra = divmod(len(owners), num_ranks)
    by_count = sorted(range(num_ranks), key=lambda rank: -counts[rank])
    room = {rank: base + (place < extra) for place, rank in enumerate(by_count)}
    kept = []
    for owner in owners:
        kept.append(room[owner] > 0)
        room[owner] -= kept[-1]
    free = iter([rank for rank in range(num_ranks) for _ in range(room[rank])])
    return [owner if keeps else next(free) for owner, keeps in zip(owners, kept, strict=True)]
