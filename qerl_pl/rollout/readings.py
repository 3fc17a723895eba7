"""Compute from a rollout, over the completions of all ranks, the numbers that the callback RolloutEvidence tests."""

import math

import torch
from torch import Tensor

from qerl_pl.common import ranks
from qerl_pl.policy.jumps import far_share, high_gap, logit_gap
from qerl_pl.rewards.base import score_rewards
from qerl_pl.rewards.guard import RewardError
from qerl_pl.rollout.loop import RolloutLoop
from qerl_pl.rollout.scored import ScoredBatch


def gaps_of(trainer: Tensor, other: Tensor, rows: Tensor) -> dict[str, float]:
    """Compare the log-probabilities of the trainer with those of ``other``, such as the sampler, over the tokens of all
    ranks. Returns the mean absolute difference ("gap"), the same mean for single completions, of which one in 32
    reaches the returned value ("high_gap"), the mean difference of logits, as estimated from the log-probabilities
    ("logit_gap"), and the share of tokens whose probabilities differ by a factor above 8 ("far_share"). The arguments
    are for this rank's N tokens: log-probabilities in nats, [N] fp64, and the index of each token's completion, [N]
    int64. Every rank must call this function, because it gathers from all ranks."""
    log_ratio = trainer - other
    size = int(rows.max()) + 1 if len(rows) else 0
    sums = log_ratio.new_zeros(size).index_add(0, rows, log_ratio.abs())
    counts = log_ratio.new_zeros(size).index_add(0, rows, torch.ones_like(log_ratio))
    of_rows = sums[counts > 0] / counts[counts > 0]
    far = far_share(log_ratio) * len(log_ratio)
    totals = [log_ratio.abs().sum().item(), logit_gap(trainer, other).sum().item(), far, len(log_ratio)]
    parts: list[tuple[list[float], list[float]]] = ranks.gather_values((of_rows.tolist(), totals))
    row_gaps = torch.tensor([gap for part, _ in parts for gap in part], dtype=torch.float64)
    gap, logits, far, count = map(math.fsum, zip(*(totals for _, totals in parts), strict=True))
    count = max(1, count)
    high = high_gap(row_gaps) if len(row_gaps) else 0.0
    return {"gap": gap / count, "high_gap": high, "logit_gap": logits / count, "far_share": far / count}


def lengths_and_means(batch: ScoredBatch) -> list[tuple[float, float]]:
    """Return for each completion its number of tokens and the mean of their log-probabilities in nats. Equal
    completions of a prompt get the mean of the first one: an engine finds their prompt cached, so their own may differ
    in the last bits, which the test of whether values depend on the place in the group would find."""
    firsts: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}
    return [
        (
            float(len(row.tokens)),
            firsts.setdefault((prompt.tokens, row.tokens), math.fsum(row.logprobs) / len(row.tokens)),
        )
        for prompt, row in zip(batch.prompts, batch.completions, strict=True)
    ]


def num_different(trainer: Tensor) -> int:
    """Count how many different values the trainer's log-probabilities [N] of this rank's N tokens have, and add up
    these numbers over the ranks. Tokens of equal completions count once, and so do tokens with probability 1."""
    return sum(ranks.gather_values(len(trainer.unique())))


def have_own_rewards(loop: RolloutLoop, batch: ScoredBatch) -> bool:
    """Return whether each completion of all ranks' batches gets the same reward if the others of its group are left
    out. Some do not if a reward compares completions or draws random numbers. Every rank must call this function."""
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
