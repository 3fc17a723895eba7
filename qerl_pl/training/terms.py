"""What the loss takes from the whole batch, over micro-batches and ranks, before its first gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qerl_pl.common import ranks
from qerl_pl.common.seeding import derive_seed
from qerl_pl.objective import Objective
from qerl_pl.objective.covariance import CovarianceControl, held_back_number, largest_threshold, token_covariance
from qerl_pl.objective.losses import count_divisor, entropy_threshold
from qerl_pl.training.passes import Batch


@dataclass(frozen=True)
class BatchTerms:
    """Of B rows on this rank, in M mini-batches."""

    mini_batch: Tensor
    """[B] int64, the mini-batch of each row."""
    kept: Tensor
    """[B, S] bool, tokens that carry the policy loss."""
    counted: Tensor
    """[B, S] bool, tokens over which the policy loss is averaged."""
    divisors: Tensor
    """[M] of the KL and entropy terms, over all ranks."""
    policy_divisors: Tensor
    """[M] of the policy loss."""
    penalized: Tensor | None
    """[B, S] bool, tokens that pay for leaving the old policy; None where none does."""
    held_back_share: Tensor | None
    """[] share of the tokens of all ranks that the control of the covariance holds back; None without."""
    mean_entropy: float | None
    """Nats per token that counts, over all ranks; None where nothing follows it."""


def batch_terms(
    batch: Batch, objective: Objective, *, group_size: int, num_mini_batches: int, max_tokens: int, seed: int
) -> BatchTerms:
    """Collective: every rank calls it with the same settings and its own rows.

    Args:
        batch: with its log-probabilities and entropies where the objective needs them first.
        objective: the loss.
        group_size: completions a prompt.
        num_mini_batches: optimizer steps that share the rows of a pass.
        max_tokens: longest completion that could have been sampled.
        seed: of what is drawn on this batch, the same on all ranks.
    """
    experience = batch.experience
    kept = counted = experience.mask
    if objective.top_entropy_share < 1:
        threshold = entropy_threshold(ranks.gather(batch.entropy[kept]), objective.top_entropy_share)
        kept = kept & (batch.entropy >= threshold)
    penalized = held_back_share = None
    if objective.covariance is not None:
        held, held_back_share = held_back(batch, objective.covariance, group_size=group_size, seed=seed)
        if objective.covariance.kind == "kl":
            penalized = held
        else:
            kept = kept & ~held
    if objective.correction_divisor == "kept":
        log_ratio = batch.old - experience.sampler_logprobs
        counted = counted & (objective.importance(log_ratio, counted).weights > 0)
    mini_batch = mini_batches(len(experience.lengths) // group_size, num_mini_batches).repeat_interleave(group_size)
    mini_batch = mini_batch.to(batch.rows.device)
    counts = [
        count_divisor(mask[mini_batch == index], objective.averaging, max_tokens=max_tokens)
        for mask in (experience.mask, counted)
        for index in range(num_mini_batches)
    ]
    # A mean over ranks, because the gradients are averaged too.
    divisors, policy_divisors = ranks.mean(torch.stack(counts).double()).view(2, -1)
    mean_entropy = None
    if objective.entropy_control is not None:
        entropies = batch.entropy[experience.mask].double()
        total, count = ranks.mean(torch.stack([entropies.sum(), entropies.new_tensor(len(entropies))])).tolist()
        mean_entropy = total / max(count, torch.finfo(torch.float64).tiny)
    return BatchTerms(mini_batch, kept, counted, divisors, policy_divisors, penalized, held_back_share, mean_entropy)


def held_back(batch: Batch, control: CovarianceControl, *, group_size: int, seed: int) -> tuple[Tensor, Tensor]:
    """[B, S] bool, the tokens that are held back, and their share of all. Collective."""
    mask, advantages = batch.experience.mask, batch.experience.advantages
    logprobs = batch.old[mask].double()
    per_token = advantages.unsqueeze(1).expand_as(mask)[mask].double()
    sums = ranks.mean(torch.stack([logprobs.sum(), per_token.sum(), mask.sum().double()]))
    mean_logprob, mean_advantage = sums[:2] / sums[2].clamp(min=torch.finfo(sums.dtype).tiny)
    values = token_covariance(batch.old, advantages, mean_logprob=mean_logprob, mean_advantage=mean_advantage)
    number = held_back_number(len(ranks.gather(logprobs)), control.share)
    candidates, order = mask, values
    if control.kind == "clip":
        candidates, order = mask & (values > control.low) & (values < control.high), _draws(batch, group_size, seed)
    held = candidates & (order >= largest_threshold(ranks.gather(order[candidates]), number))
    counts = ranks.mean(torch.stack([held.sum(), mask.sum()]).double())
    return held, counts[0] / counts[1].clamp(min=1)


def _draws(batch: Batch, group_size: int, seed: int) -> Tensor:
    """[B, S] fp64, a number from [0, 1) for each sampled token: a function of its place in the batch of all ranks."""
    sampled = batch.experience.sampled
    draws = torch.zeros(sampled.shape, dtype=torch.float64)
    for row, tokens in enumerate(sampled.cpu()):
        group = (row // group_size) * ranks.num_ranks() + ranks.rank()
        generator = torch.Generator().manual_seed(
            derive_seed(seed, "covariance", group * group_size + row % group_size)
        )
        draws[row, tokens] = torch.rand(int(tokens.sum()), generator=generator, dtype=torch.float64)
    return draws.to(sampled.device)


def mini_batches(num_groups: int, num_mini_batches: int) -> Tensor:
    """[groups] int64, the mini-batch of each group of this rank. Collective.

    Whole groups in the order of the batch over all ranks, of which rank r of W has the groups r, r + W, ...: which
    groups share a step does not depend on W. Where dynamic sampling left fewer groups the mini-batches are smaller.
    """
    if num_mini_batches == 1:
        return torch.zeros(num_groups, dtype=torch.int64)
    total = int(ranks.gather(torch.tensor([num_groups])).sum())
    place = torch.arange(num_groups) * ranks.num_ranks() + ranks.rank()
    return (place * num_mini_batches // total).clamp(max=num_mini_batches - 1)
