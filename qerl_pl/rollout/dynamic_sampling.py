"""Dynamic sampling: groups that teach nothing are replaced by further ones (DAPO)."""

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
from qerl_pl.common.types import Prompt
from qerl_pl.rollout.scored import ScoredBatch


@dataclass(frozen=True)
class DynamicSampling:
    """Sample further prompts until the batch is full of groups with a signal (arXiv 2503.14476, section 3.2).

    A group has a signal if a row of it that is in the loss has an advantage other than 0. The prompts of a rollout are
    one sequence, a function of the run's seed and the rollout index: first the batch, then further ones. The batch that
    is trained on is the first so many of them that have a signal, over all ranks. So it does not depend on how many are
    sampled at once, nor on the number of ranks, and a resume has nothing to restore. Groups are handed from rank to
    rank until all train on equally many.

    Args:
        max_refills: how often further prompts may be sampled for one rollout.
        when_short: what to do if the batch is not full then: stop with an "error", or train on the "smaller" batch.
        metric: name of a reward that has to differ inside a group too, such as the one for the right answer: then
            neither all right nor all wrong, whatever the form or the length (0 < right < G, equation 11). null: the sum
            of the rewards decides.
        oversample: how many times as many prompts are sampled as the share of groups with a signal so far asks for; the
            first time the batch itself, as if all had one. With 30 % of them and 8 prompts a batch: 1 takes 4.0 rounds
            of sampling one after the other and 29 groups, 2 takes 2.2 and 32, 3 takes 1.6 and 36.

    Raises:
        ValueError: ``max_refills`` is less than 1, or ``oversample`` is not 1 to 100.
    """

    max_refills: int = 8
    when_short: Literal["error", "smaller"] = "smaller"
    metric: str | None = None
    oversample: float = 1.0

    def __post_init__(self) -> None:
        if self.max_refills < 1:
            raise ValueError(f"max_refills is {self.max_refills}; expected at least 1 (null: no dynamic sampling)")
        if not 1 <= self.oversample <= 100:
            raise ValueError(f"oversample is {self.oversample}; expected 1 to 100")

    def fill(
        self,
        prompts: Sequence[Prompt],
        more_prompts: Iterator[Prompt],
        sample: Callable[[Sequence[Prompt]], ScoredBatch],
        count: Callable[[ScoredBatch], int],
    ) -> tuple[ScoredBatch, int]:
        """Sample until as many groups as the batch has prompts have a signal, the cap is reached, or prompts run out.

        Collective: what is sampled, counted and asked for is decided over all ranks.

        Args:
            prompts: this rank's share of the batch, at least one; as many on every rank.
            more_prompts: further prompts, the same on every rank.
            sample: samples and scores this rank's prompts.
            count: groups with a signal on all ranks.

        Returns:
            Everything that this rank sampled, and the number of refills. Group j of rank r of W stands at place
            r + j * W of the sequence of prompts.
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
        """This rank's share of the first ``batch_size`` groups with a signal; None where it has none.

        Args:
            evaluation: what this rank sampled, as ``fill`` returns it.
            signal: [P] bool, which of these groups have a signal.
            batch_size: groups wanted, over all ranks.
            may_move: groups may be trained on by another rank than the one that sampled them.

        Raises:
            RuntimeError: there are fewer than wanted and ``when_short`` is "error".
        """
        shares, rank = ranks.gather_values(signal.tolist()), ranks.rank()
        found = sorted(
            own + index * len(shares) for own, flags in enumerate(shares) for index, flag in enumerate(flags) if flag
        )
        places = found[:batch_size]
        if len(places) < batch_size and self.when_short == "error":
            raise RuntimeError(
                f"dynamic sampling found {len(places)} groups with a signal among {sum(map(len, shares))}, and a batch "
                f"needs {batch_size}: the problems are too easy or too hard for the policy; change the data, raise "
                "model.dynamic_sampling.max_refills, or set when_short to smaller"
            )
        sampled_by = [place % len(shares) for place in places]
        trained_by = balanced(sampled_by, len(shares)) if may_move else sampled_by

        def groups(given: bool) -> list[int]:
            """This rank's own groups that it keeps, or that it gives away."""
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
    """A new owner for each group, so that ranks have equally many or one more, and as few as possible change hands.

    Args:
        owners: the rank that has each group now.
        num_ranks: W.
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
