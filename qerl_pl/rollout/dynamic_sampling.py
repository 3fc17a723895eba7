"""Dynamic sampling (DAPO): replace groups (the completions of one prompt) whose advantages are all 0, from which the
policy learns nothing, by groups of further prompts."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from operator import itemgetter
from typing import Literal

import torch

from qerl_pl.common import ranks
from qerl_pl.common.checks import CheckFailed, require_at_least
from qerl_pl.common.metrics import Stopwatch
from qerl_pl.common.types import Prompt
from qerl_pl.rollout.scored import ScoredBatch


@dataclass(frozen=True)
class DynamicSampling:
    """Dynamic sampling: completions of further prompts are sampled until the batch is full of groups from which the
    policy can learn (arXiv 2503.14476, section 3.2).

    A group (the completions of one prompt) has a signal if one of its completions that count in the loss has an
    advantage other than 0. The prompts of a rollout form one sequence that depends only on the run's seed and the
    rollout index: first the prompts of the batch, then further prompts. The batch that is trained on consists of the
    first groups with a signal in this sequence, over all ranks. It therefore does not depend on how many prompts are
    sampled at once or on the number of ranks, and a resumed run has no state to restore. Groups are sent between ranks
    so that the numbers of groups on which ranks train differ by at most one.

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
    """

    max_refills: int = 8
    when_short: Literal["error", "smaller"] = "smaller"
    metric: str | None = None
    oversample: float = 1.0

    def __post_init__(self) -> None:
        section, hint = "model.dynamic_sampling.", " (null: no dynamic sampling)"
        require_at_least(1, section=section, max_refills=self.max_refills, hint=hint)
        if not 1 <= self.oversample <= 100:
            raise ValueError(f"model.dynamic_sampling.oversample is {self.oversample}; expected 1 to 100")

    def fill(
        self,
        prompts: Sequence[Prompt],
        more_prompts: Iterator[Prompt],
        sample: Callable[[Sequence[Prompt]], ScoredBatch],
        watch: Stopwatch,
    ) -> tuple[ScoredBatch, int]:
        """Sample completions of ``prompts``, and then of ``more_prompts``, until the groups of all ranks that have a
        signal are enough to fill the batch, further prompts have been sampled ``max_refills`` times, or no prompts are
        left. Every rank must call this method with ``prompts`` of its own, as many as the other ranks have, and with
        ``more_prompts`` that are the same on all ranks.

        Returns all groups that this rank sampled, with or without a signal, and the number of times that further
        prompts were sampled. On rank r of W, the j-th returned group belongs to prompt r + j * W of the rollout's
        sequence of prompts; both are counted from 0.
        """
        rank, num_ranks = ranks.rank(), ranks.num_ranks()
        batch_size = num_sampled = len(prompts) * num_ranks
        most = math.ceil(self.oversample * batch_size)

        def next_share(size: int) -> tuple[list[Prompt], int]:
            chunk = list(islice(more_prompts, size))
            return [prompt for place, prompt in enumerate(chunk, num_sampled) if place % num_ranks == rank], len(chunk)

        share, num_more = next_share(most - batch_size)
        num_sampled += num_more
        sampled = sample([*prompts, *share])
        for refill in range(self.max_refills):
            with watch.phase("wait"):
                num_useful = sum(ranks.gather_values(int(sampled.has_signal.sum())))
            if num_useful >= batch_size:
                return sampled, refill
            missing = self.oversample * (batch_size - num_useful)
            share, num_more = next_share(
                min(math.ceil(missing * num_sampled / num_useful), most) if num_useful else most
            )
            if not num_more:
                return sampled, refill
            num_sampled += num_more
            if share:
                sampled += sample(share)
        return sampled, self.max_refills

    def choose(
        self, sampled: ScoredBatch, *, batch_size: int, may_move: bool = True
    ) -> tuple[ScoredBatch | None, list[int]]:
        """Choose the groups to train on: of the groups of all ranks, in the order of the rollout's sequence of prompts,
        the first ``batch_size`` that have a signal. Every rank must call this method, because the ranks exchange
        groups.

        Returns the groups that this rank trains on (None if there are none), and the index of each of them among the
        groups that all ranks train on, in the same order. If ``may_move`` is False, each rank trains only on groups
        that it has sampled. Raises CheckFailed if fewer than ``batch_size`` groups have a signal and ``when_short`` is
        "error".
        """
        rank, num_ranks = ranks.rank(), ranks.num_ranks()
        shares = ranks.gather_values(sampled.has_signal.tolist())
        places = sorted(
            of_rank + index * num_ranks
            for of_rank, flags in enumerate(shares)
            for index, flag in enumerate(flags)
            if flag
        )[:batch_size]
        if len(places) < batch_size and self.when_short == "error":
            raise CheckFailed(
                f"dynamic sampling found {len(places)} groups with advantages other than 0 among "
                f"{sum(map(len, shares))}, and a batch needs {batch_size}: the problems are too easy or too hard for "
                "the policy; change the data, raise model.dynamic_sampling.max_refills, or set when_short to smaller"
            )
        sampled_by = [place % num_ranks for place in places]
        trained_by = balanced(sampled_by, num_ranks) if may_move else sampled_by

        mine = [(place, new) for place, old, new in zip(places, sampled_by, trained_by, strict=True) if old == rank]
        stay = [place // num_ranks for place, new in mine if new == rank]
        parts = [sampled.select(torch.tensor(stay))] if stay else []
        if trained_by != sampled_by:
            leave = [
                (place, new, sampled.select(torch.tensor([place // num_ranks]))) for place, new in mine if new != rank
            ]
            moved = sorted(chain.from_iterable(ranks.gather_values(leave)), key=itemgetter(0))
            parts += [group for _, new, group in moved if new == rank]
        # first the groups that this rank sampled, then those that it gets
        order = sorted((old != rank, index) for index, old in enumerate(sampled_by) if trained_by[index] == rank)
        return sum(parts[1:], parts[0]) if parts else None, [index for _, index in order]


def balanced(owners: Sequence[int], num_ranks: int) -> list[int]:
    """Decide which rank trains on each group, given the rank that sampled it (``owners``): the numbers of groups on
    which the ranks train differ by at most one, and as few groups as possible are moved to another rank."""
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
