"""Compute the masks and divisors of the loss that depend on all micro-batches and ranks, before the first backward pass
on a rollout."""

from dataclasses import dataclass

import torch
from torch import Tensor

from qerl_pl.common import ranks
from qerl_pl.objective import ResolvedObjective
from qerl_pl.objective.losses import count_divisor, entropy_threshold
from qerl_pl.training.passes import Batch


@dataclass(frozen=True)
class BatchTerms:
    """Masks and divisors of the loss for the B rows of this rank, which are divided into M mini-batches (one optimizer
    step each). S is the number of tokens of the longest row.

    The masks of one row are related as follows (P: token of the prompt, x: True, a dot: False):

        experience.sampled   P P P x x x x x x   tokens that the policy sampled
        experience.mask      P P P x x x x x x   the same tokens, or none if the row is left out of the loss
        counted              P P P x x . x x x   tokens of mask; with divisor "kept", those with weight > 0
        kept                 P P P . x x . x .   tokens of mask with high entropy, which alone have a policy loss

    The policy loss is the sum over ``kept``, divided by a count over ``counted``; KL and entropy terms are means over
    ``mask``. The weight in the third line is the importance weight between trainer and sampler.
    """

    mini_batch: Tensor
    """[B] int64, index of each row's mini-batch."""
    kept: Tensor
    """[B, S] bool, True for tokens that have a policy loss."""
    counted: Tensor
    """[B, S] bool, True for tokens that count in the divisor of the policy loss."""
    divisors: Tensor
    """[M] divisor of the KL and entropy terms of each mini-batch, averaged over the ranks."""
    policy_divisors: Tensor
    """[M] divisor of the policy loss of each mini-batch, averaged over the ranks."""


def batch_terms(batch: Batch, objective: ResolvedObjective) -> BatchTerms:
    """Compute the masks and divisors of a batch. If the objective has a threshold on entropies or the divisor "kept",
    the batch must already have entropies and old log-probabilities. Every rank must call this function, with equal
    settings and its own rows."""
    experience, settings = batch.experience, batch.settings
    kept = counted = experience.mask
    if objective.top_entropy_share < 1:
        threshold = entropy_threshold(ranks.gather(batch.entropy[kept]), objective.top_entropy_share)
        kept = kept & (batch.entropy >= threshold)
    if objective.correction_divisor == "kept":
        log_ratio = batch.old - experience.sampler_logprobs
        counted = counted & (objective.importance(log_ratio, counted).weights > 0)
    of_groups = mini_batches(len(experience.lengths) // settings.group_size, settings.num_mini_batches)
    mini_batch = of_groups.repeat_interleave(settings.group_size).to(batch.rows.device)
    counts = [
        count_divisor(mask[mini_batch == index], objective.aggregation, max_tokens=settings.max_tokens)
        for mask in (experience.mask, counted)
        for index in range(settings.num_mini_batches)
    ]
    # Divisors are averaged over ranks and not summed, because the gradients are averaged over ranks too.
    divisors, policy_divisors = ranks.mean(torch.stack(counts).double()).view(2, -1)
    return BatchTerms(mini_batch, kept, counted, divisors, policy_divisors)


def mini_batches(num_groups: int, num_mini_batches: int) -> Tensor:
    """Assign each group (the completions of a prompt) of this rank to a mini-batch; returns the indices of the
    mini-batches, [num_groups] int64. Every rank must call this function.

    Mini-batches consist of whole groups in the order of the global batch, of which rank r of W has the groups r, r + W,
    r + 2W and so on. So the mini-batches do not depend on the number of ranks W. If dynamic sampling leaves fewer
    groups, mini-batches are smaller.
    """
    if num_mini_batches == 1:
        return torch.zeros(num_groups, dtype=torch.int64)
    total = int(ranks.gather(torch.tensor([num_groups])).sum())
    place = torch.arange(num_groups) * ranks.num_ranks() + ranks.rank()
    return (place * num_mini_batches // total).clamp(max=num_mini_batches - 1)
