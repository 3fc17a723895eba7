"""Compute from a rollout's completions and rewards, over all ranks, numbers that the callback RolloutEvidence tests."""

import math

import torch
from torch import Tensor

from qerl_pl.common import ranks
from qerl_pl.policy.branches import branch_evidence
from qerl_pl.policy.evidence import order_evidence
from qerl_pl.rewards.base import score_rewards
from qerl_pl.rewards.guard import RewardError
from qerl_pl.rollout.loop import RolloutLoop
from qerl_pl.rollout.scored import ScoredBatch


def lengths_and_means(batch: ScoredBatch) -> list[tuple[float, float]]:
    """Return for each completion its number of tokens and the mean of their log-probabilities in nats. Equal
    completions of a prompt all get the mean of the first one: an engine finds the prompt of later ones in its cache, so
    their own means may differ in the last bits, which would mislead the test of whether values depend on the place in
    the group."""
    firsts: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}
    numbers = []
    for prompt, row in zip(batch.prompts, batch.completions, strict=True):
        mean = math.fsum(row.logprobs) / len(row.tokens)
        numbers.append((float(len(row.tokens)), firsts.setdefault((prompt.tokens, row.tokens), mean)))
    return numbers


def evidence_of_order(batch: ScoredBatch, seed: int) -> Tensor:
    """Test whether lengths and mean log-probabilities depend on a completion's place in its group
    (``evidence.order_evidence``). ``seed``, from which equal values get a random order, must be the same on all
    ranks."""
    numbers = torch.tensor(ranks.gather_groups(lengths_and_means(batch), batch.group_size), dtype=torch.float64)
    values = numbers.T.reshape(2, -1, batch.group_size)
    generator = torch.Generator().manual_seed(seed)
    return order_evidence(values, torch.rand(values.shape, generator=generator, dtype=torch.float64))


def evidence_of_branches(batch: ScoredBatch, *, with_rewards: bool) -> Tensor:
    """Test whether the engine selects completions by length or, if ``with_rewards``, by reward
    (``branches.branch_evidence``)."""
    rewards = (batch.table.total.nan_to_num() * with_rewards).tolist()
    texts = [(row.tokens, row.logprobs) for row in batch.completions]
    numbers = [[len(row.tokens), reward] for row, reward in zip(batch.completions, rewards, strict=True)]
    starts = [slice(start, start + batch.group_size) for start in range(0, len(texts), batch.group_size)]
    evidence = branch_evidence([texts[group] for group in starts], [numbers[group] for group in starts])
    return torch.tensor(ranks.gather_values(evidence.tolist()), dtype=torch.float64).sum(dim=0)


def have_own_rewards(loop: RolloutLoop, batch: ScoredBatch) -> bool:
    """Return whether each completion of all ranks' batches gets the same reward when it is scored without the others of
    its group. This is not so if a reward compares completions or draws random numbers. Every rank must call this
    function."""
    equal = True
    try:
        for place in range(batch.group_size):
            part = slice(place, None, batch.group_size)
            alone = score_rewards(loop.rewards, batch.prompts[part], batch.completions[part], progress=loop.progress)
            equal &= torch.allclose(alone.total, batch.table.total[part])
            equal &= alone.scored.equal(batch.table.scored[part])
    except RewardError:  # such as that of a reward that expects whole groups
        equal = False
    return all(ranks.gather_values(equal))
