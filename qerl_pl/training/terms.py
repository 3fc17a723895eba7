"""Decide which tokens of a rollout count in which term of the loss, and by which number of tokens or rows each term is
divided. Both depend on all micro-batches and ranks, so they are computed before the first backward pass."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qerl_pl.common import ranks
from qerl_pl.objective import ResolvedObjective
from qerl_pl.objective.losses import count_divisor, entropy_threshold
from qerl_pl.training.passes import Batch


@dataclass(frozen=True)
class BatchTerms:
    """Masks and divisors of the loss for the B rows of this rank, in M mini-batches (one optimizer step each).

    An example of the masks of one row (P: token of the prompt, x: True, a dot: False):

        experience.sampled   P P P x x x x x x   tokens that the policy sampled
        experience.mask      P P P x x x x x x   the same tokens, or none if the row is left out of the loss
        counted              P P P x x . x x x   tokens of experience.mask over which the policy loss is averaged
        kept                 P P P . x x . x .   tokens of experience.mask that have a policy loss

    ``counted`` equals ``experience.mask``, unless the setting ``correction_divisor`` is "kept"; then it has only the
    tokens whose importance weight is above 0. ``kept``, whatever this setting, equals ``experience.mask``, unless
    ``top_entropy_share`` is below 1; then it has only the tokens of highest entropy. The policy loss is summed over
    ``kept`` and divided by the number of tokens or rows in ``counted``. KL, entropy and teacher terms are averaged over
    ``experience.mask``.
    """

    mini_batch: Tensor
    """[B] int64, index of each row's mini-batch."""
    kept: Tensor
    """[B, S] bool, True for tokens that have a policy loss."""
    counted: Tensor
    """[B, S] bool, True for tokens that count in the divisor of the policy loss."""
    divisors: Tensor
    """[M] divisor of the KL, entropy and teacher terms of each mini-batch, averaged over the ranks."""
    policy_divisors: Tensor
    """[M] divisor of the policy loss of each mini-batch, averaged over the ranks."""


def batch_terms(batch: Batch, objective: ResolvedObjective) -> BatchTerms:
    """Compute the masks and divisors of the loss for a rollout. ``batch`` must already have entropies and old
    log-probabilities if ``objective.needs_first_pass``. Every rank must call this function with its own rows and equal
    settings, because counts are summed over ranks."""
    experience, settings = batch.experience, batch.settings
    kept = counted = experience.mask
    if objective.top_entropy_share < 1:
        threshold = entropy_threshold(ranks.gather(batch.entropy[kept]), objective.top_entropy_share)
        kept = kept & (batch.entropy >= threshold)
    if objective.correction_divisor == "kept":
        log_ratio = batch.old - experience.sampler_logprobs
        counted = counted & (objective.importance(log_ratio, counted).weights > 0)
    places = settings.places or ranks.own_places(len(experience.lengths) // settings.group_size)
    of_groups = mini_batches(places, settings.num_mini_batches)
    mini_batch = of_groups.repeat_interleave(settings.group_size).to(batch.rows.device)
    counts = [
        count_divisor(mask[mini_batch == index], objective.aggregation, max_tokens=settings.max_tokens)
        for mask in (experience.mask, counted)
        for index in range(settings.num_mini_batches)
    ]
    # Divisors are averaged over ranks and not summed, because the gradients are averaged over ranks too.
    divisors, policy_divisors = ranks.mean(torch.stack(counts).double()).view(2, -1)
    return BatchTerms(mini_batch, kept, counted, divisors, policy_divisors)


def mini_batches(places: Sequence[int], num_mini_batches: int) -> Tensor:
    """Assign each group (the completions of a prompt) of this rank to a mini-batch; returns the indices of the
    mini-batches, int64. ``places`` has the index of each group among the groups of all ranks. Every rank must call this
    function, because the indices are gathered from all ranks.

    Each mini-batch consists of consecutive groups of the batch of all ranks, so its groups do not depend on the number
    of ranks. If dynamic sampling leaves fewer groups, mini-batches are smaller.
    """
    indices = torch.tensor(places)
    if num_mini_batches == 1:
        return torch.zeros_like(indices)
    total = int(ranks.gather(indices).max()) + 1
    return indices * num_mini_batches // total
