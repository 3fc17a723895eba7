"""Compute metrics of the policy updates on one rollout, over the rows of all ranks, as scalars by name. A metric is
left out if no rank has a token or row that counts in it."""

from collections.abc import Mapping

import torch
from torch import Tensor

from qerl_pl.common import ranks
from qerl_pl.common.metrics import Mean, Pooled, over_ranks, total
from qerl_pl.objective import ResolvedObjective
from qerl_pl.objective.correction import effective_share, mismatch
from qerl_pl.training.passes import Batch

PER_TOKEN = {
    "policy/clipped_low_share": "clipped_low",
    "policy/clipped_high_share": "clipped_high",
    "policy/ratio": "ratio",
    "policy/kl_old": "k3",
    "policy/kl_ref": "kl_ref",
    "teacher/divergence": "divergence",
    "teacher/agreement": "agrees",
}
OF_ALL_TOKENS = {"reference": ("policy/kl_ref",), "teacher": ("teacher/divergence", "teacher/agreement")}
"""Metrics that are averaged over all tokens in the loss; the key is the model, reference or teacher, with which they
compare the policy. All other metrics in ``PER_TOKEN`` are averaged over the tokens that have a policy loss."""


def update_metrics(
    totals: Mapping[str, Tensor], batch: Batch, *, num_tokens: Tensor, num_kept: Tensor
) -> dict[str, Tensor]:
    """Convert sums over all optimizer steps on a rollout to means per token or per optimizer step, [] each.

    Args:
        totals: sums on this rank, by name; those of the loss are missing if this rank had no row in the loss.
        batch: the rollout, with its settings.
        num_tokens: [] number of tokens in the loss, in rows of this rank that had a backward pass.
        num_kept: [] number of those tokens that have a policy loss.
    """
    zero, num_updates = torch.zeros_like(num_tokens), batch.settings.num_updates
    num_steps = num_updates * batch.settings.num_mini_batches
    # Each rank divides its loss by a number of tokens or rows that is averaged over the ranks (``BatchTerms``), so the
    # mean of the ranks' losses is the loss of the whole batch.
    per_step = totals.get("loss", zero) / num_steps
    metrics = {"train/loss": over_ranks(Mean(), per_step), "train/grad_norm": totals["grad_norm"] / num_steps}
    has_states = batch.teacher is not None and batch.teacher.states is not None
    measured = {"reference": batch.reference is not None, "teacher": has_states}
    carried = {name: num_kept for name in PER_TOKEN if not any(name in names for names in OF_ALL_TOKENS.values())}
    carried |= {name: num_tokens for kind, names in OF_ALL_TOKENS.items() if measured[kind] for name in names}
    for name, count in carried.items():
        value = _share(totals.get(PER_TOKEN[name], zero) / num_updates, count)
        if not value.isnan() or over_ranks(total(), count) > 0:
            metrics[name] = value
    return metrics


def correction_metrics(batch: Batch, objective: ResolvedObjective) -> dict[str, Tensor]:
    """Return metrics [] of the importance weights; empty if the objective has neither importance weights nor rejection,
    or if no rank has a token in the loss."""
    if not objective.corrects:
        return {}
    experience = batch.experience
    whole = objective.importance(batch.old - experience.sampler_logprobs, experience.mask)
    num_weights, weight_sum, square_sum = ranks.mean(
        torch.stack([whole.num_units, whole.weight_sum, whole.square_sum]).double()
    )
    if num_weights == 0:
        return {}
    metrics = {"correction/effective_share": effective_share(num_weights, weight_sum, square_sum)}
    if objective.correction != "none":
        metrics["correction/outside_share"] = _share(whole.num_outside, whole.num_units)
    if objective.rejection is not None:
        metrics["correction/rejected_share"] = _share(whole.num_rejected, whole.num_rows)
    return metrics


def gap() -> Pooled:
    """Create a metric that computes statistics of log(p_trainer / p_sampler), in nats, over the sampled tokens of all
    ranks (``objective.correction.mismatch``)."""
    return Pooled(lambda log_ratio: mismatch(log_ratio)._asdict())


def gap_metrics(batch: Batch) -> dict[str, Tensor]:
    """Return statistics [] of log(p_trainer / p_sampler), in nats, over the sampled tokens of all ranks, for the
    trainer before its first update on the rollout."""
    log_ratio = (batch.old - batch.experience.sampler_logprobs)[batch.experience.sampled]
    return {f"gap/{name}": value for name, value in over_ranks(gap(), log_ratio).items()}


def teacher_metrics(batch: Batch) -> dict[str, Tensor]:
    """Return "teacher/kl", the mean over the tokens in the loss of log(policy / teacher) before the first update on the
    rollout, which estimates KL(policy || teacher) in nats per token; empty without a teacher or tokens."""
    if batch.teacher is None:
        return {}
    mask = batch.experience.mask
    value = _share((batch.old - batch.teacher.logprobs)[mask].sum(), mask.sum())
    return {} if over_ranks(total(), mask.sum()) == 0 else {"teacher/kl": value}


def _share(part: Tensor, whole: Tensor) -> Tensor:
    return over_ranks(Mean(), part / whole.clamp(min=1), whole)
