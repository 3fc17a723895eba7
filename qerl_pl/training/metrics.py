"""What is logged of the updates on a batch, over the rows of all ranks. What was not measured is absent."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from qerl_pl.common import ranks
from qerl_pl.objective import Objective
from qerl_pl.objective.correction import effective_share
from qerl_pl.training.passes import Batch

PER_TOKEN = {
    "policy/clipped_low_share": "clipped_low",
    "policy/clipped_high_share": "clipped_high",
    "policy/ratio": "ratio",
    "policy/kl_old": "k3",
    "policy/kl_ref": "kl_ref",
}


def update_metrics(
    totals: Mapping[str, Tensor],
    *,
    num_tokens: Tensor,
    num_kept: Tensor,
    num_updates: int,
    num_steps: int,
    reference: bool,
) -> dict[str, Tensor]:
    """Means per token: the surrogate's over the tokens that carry it, the KL to the reference over all that count.

    Args:
        totals: sums over all updates by name; those of a loss are missing where this rank had no row in it.
        num_tokens: [] tokens that count in the loss, of rows with a gradient.
        num_kept: [] those of them that carry the policy loss.
        num_updates: passes over the batch.
        num_steps: optimizer steps.
        reference: the KL to the base was measured.
    """
    zero = torch.zeros_like(num_tokens)
    sums = [num_tokens, num_kept, *(totals.get(total, zero) for total in (*PER_TOKEN.values(), "loss"))]
    num_tokens, num_kept, *sums, loss = ranks.mean(torch.stack([value.double() for value in sums]))
    found = {"train/loss": loss / num_steps, "train/grad_norm": totals["grad_norm"] / num_steps}
    for (name, total), value in zip(PER_TOKEN.items(), sums, strict=True):
        count = num_tokens if total == "kl_ref" else num_kept
        if count > 0 and (reference or total != "kl_ref"):
            found[name] = value / (count * num_updates)
    return found


def correction_metrics(batch: Batch, objective: Objective) -> dict[str, Tensor]:
    """Shares that were out of bounds or rejected, and the effective sample size; nothing without a correction."""
    if not objective.corrects:
        return {}
    experience = batch.experience
    whole = objective.importance(batch.old - experience.sampler_logprobs, experience.mask)
    sums = ranks.mean(torch.stack([value.double() for value in whole[1:]]))
    units, outside, weights, squares, rows, rejected = sums
    tiny = torch.finfo(units.dtype).tiny
    found = {"correction/effective_share": effective_share(units, weights, squares)}
    if objective.correction != "none":
        found["correction/outside_share"] = outside / units.clamp(min=tiny)
    if objective.rejection is not None:
        found["correction/rejected_share"] = rejected / rows.clamp(min=tiny)
    return found
