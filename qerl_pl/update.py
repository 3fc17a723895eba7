"""The trainer's half of an iteration: experience in, optimizer steps out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from qerl_pl import ranks
from qerl_pl.advantages import less_penalty
from qerl_pl.correction import Correction, effective_share, importance_weights
from qerl_pl.losses import count_divisor, entropy_threshold, kl_estimate
from qerl_pl.memory.retry import MicroBatchBudget
from qerl_pl.objective import Objective
from qerl_pl.policy.policy import Policy
from qerl_pl.rollout.collate import micro_batches
from qerl_pl.stopwatch import Stopwatch
from qerl_pl.types import Experience


@dataclass(frozen=True)
class UpdateReport:
    """What the updates on one batch saw."""

    metrics: dict[str, Tensor]
    """Name to [] value, over the rows of all ranks."""
    old_logprobs: Tensor
    """[B, S] fp32 nats of the trainer before its first update, 0 where nothing was sampled."""
    entropy: Tensor
    """[B, S] fp32 nats, likewise."""
    experience: Experience
    """As used: on the policy's device, the KL taken off the advantages where ``kl_in`` is "reward"."""
    micro_batch_tokens: int
    """As given, or what was left of it when memory ran out."""


def improve(
    policy: Policy,
    experience: Experience,
    objective: Objective,
    *,
    group_size: int,
    temperature: float,
    max_tokens: int,
    num_updates: int,
    micro_batch_tokens: int,
    backward: Callable[[Tensor], None],
    step: Callable[[], Tensor],
    watch: Stopwatch,
) -> UpdateReport:
    """Update the policy ``num_updates`` times on one batch.

    The old log-probabilities are the trainer's own before the first update. Where nothing else needs them earlier they
    are read off the first update's forward pass, so one update a rollout costs one forward pass. Rows without a
    gradient (advantage exactly 0, or left out of the loss) get a forward pass without one, for the statistics.

    When memory runs out the passes of an update, or of an evaluation, begin again with half the tokens. Only whole
    gradients reach ``step``, and the divisor is that of the batch, so the update is the same to rounding.

    Where several ranks share a batch each gives its rows here at the same time. Ranks need not have equally many rows
    or micro-batches: they meet once before the updates, in ``step``, and for the metrics.

    Args:
        policy: in training mode.
        experience: B = P * group_size rows.
        objective: the loss.
        group_size: completions a prompt.
        temperature: of sampling; logits are divided by it here too.
        max_tokens: longest completion that could have been sampled.
        num_updates: optimizer steps on this batch.
        micro_batch_tokens: most tokens in one forward and backward pass; a longer row is a pass by itself.
        backward: adds a loss's gradient.
        step: averages the gradients over ranks, clips, takes an optimizer step, clears the gradients; returns the norm
            before clipping, [].
        watch: gets the seconds of the phases logprob, wait (for slower ranks) and train.
    """
    device = next(policy.parameters()).device
    experience = experience.to(device)
    old = torch.zeros_like(experience.sampler_logprobs)  # [B, S]
    entropy, reference = torch.zeros_like(old), None
    budget, longest = MicroBatchBudget(micro_batch_tokens), int(experience.lengths.max())

    def evaluate(rows: Tensor, logprobs: Tensor, entropies: Tensor | None = None) -> None:
        def forward(max_tokens: int) -> None:
            for chunk in micro_batches(experience.lengths[rows], max_tokens):
                part = _Part(experience, rows[chunk.to(device)])
                with torch.no_grad():
                    stats = policy.token_stats(part.tokens, part.sampled, temperature=temperature)
                part.write(logprobs, stats.logprobs)
                if entropies is not None:
                    part.write(entropies, stats.entropy)

        budget.run(forward, longest=longest)

    def correct(log_ratio: Tensor, mask: Tensor) -> Correction:
        return importance_weights(
            log_ratio,
            mask,
            mode=objective.correction,
            level=objective.correction_level,
            low=objective.correction_low,
            high=objective.correction_high,
        )

    every_row = torch.arange(len(old), device=device)
    with watch.phase("logprob"):
        if objective.kl_coefficient > 0:
            reference = torch.zeros_like(old)
            with policy.model.disable_adapter():
                evaluate(every_row, reference)
        if objective.needs_first_pass:
            evaluate(every_row, old, entropy)
            if objective.kl_in == "reward" and reference is not None:
                experience = _kl_in_reward(experience, objective, old, reference, group_size)
        counts = experience.mask.any(dim=1)
        if not objective.every_row_counts:
            counts &= experience.advantages != 0
        live, silent = every_row[counts], every_row[~counts]
        if not objective.needs_first_pass:
            evaluate(silent, old, entropy)

    kept = experience.mask
    with watch.phase("wait"):
        if objective.top_entropy_share < 1:
            threshold = entropy_threshold(ranks.gather(entropy[kept]), objective.top_entropy_share)
            kept = kept & (entropy >= threshold)
        # A mean over ranks, because the gradients are averaged too.
        divisor = ranks.mean(count_divisor(experience.mask, objective.averaging, max_tokens=max_tokens).float())

    def passes(update: int, max_tokens: int) -> dict[str, Tensor]:
        """Add up the gradient of one update; returns the sums of its metrics."""
        sums: dict[str, Tensor] = {}
        for chunk in micro_batches(experience.lengths[live], max_tokens):
            part = _Part(experience, live[chunk.to(device)])
            stats = policy.token_stats(part.tokens, part.sampled, temperature=temperature)
            if update == 0 and not objective.needs_first_pass:
                part.write(old, stats.logprobs.detach())
                part.write(entropy, stats.entropy.detach())
            mask = part.read(experience.mask)
            against = experience.sampler_logprobs if objective.ratio_against == "sampler" else old
            loss, surrogate, kl = objective.loss(
                stats.logprobs,
                stats.entropy,
                old_logprobs=part.read(against),
                ref_logprobs=None if reference is None else part.read(reference),
                advantages=experience.advantages[part.rows],
                mask=mask,
                kept=part.read(kept),
                importance=correct(part.read(old) - part.read(experience.sampler_logprobs), mask).weights,
                divisor=divisor,
            )
            with torch.autograd.set_multithreading_enabled(False):  # small passes wait for autograd's own thread
                backward(loss)
            for name, value in {**surrogate._asdict(), "loss": loss.detach(), "kl_ref": kl}.items():
                sums[name] = sums.get(name, 0) + value
        return sums

    totals: dict[str, Tensor] = {}
    with watch.phase("train"):
        for update in range(num_updates):
            sums = budget.run(partial(passes, update), longest=longest, undo=policy.zero_grad)
            for name, value in {**sums, "grad_norm": step()}.items():
                totals[name] = totals.get(name, 0) + value
    metrics = _metrics(
        totals,
        num_tokens=experience.mask[live].sum(),
        num_kept=kept[live].sum(),
        num_updates=num_updates,
        reference=reference is not None,
    )
    if objective.correction != "none":
        whole = correct(old - experience.sampler_logprobs, experience.mask)
        sums = (whole.num_outside, whole.num_units, whole.weight_sum, whole.square_sum)
        outside, units, weights, squares = ranks.mean(torch.stack([value.double() for value in sums]))
        metrics["correction/outside_share"] = outside / units.clamp(min=torch.finfo(units.dtype).tiny)
        metrics["correction/effective_share"] = effective_share(units, weights, squares)
    metrics["train/micro_batch_tokens"] = torch.tensor(float(budget.tokens))
    return UpdateReport(metrics, old, entropy, experience, budget.tokens)


class _Part:
    """Some rows of a batch, cut to the longest of them."""

    def __init__(self, experience: Experience, rows: Tensor) -> None:
        self.rows = rows
        self.width = int(experience.lengths[rows].max())
        self.tokens = self.read(experience.tokens)
        self.sampled = self.read(experience.sampled)

    def read(self, whole: Tensor) -> Tensor:
        return whole[self.rows, : self.width]

    def write(self, whole: Tensor, values: Tensor) -> None:
        whole[self.rows, : self.width] = values


def _kl_in_reward(
    experience: Experience, objective: Objective, old: Tensor, reference: Tensor, group_size: int
) -> Experience:
    kl = kl_estimate(old, reference, experience.sampled, objective.kl_estimator).sum(dim=1)
    advantages, penalty, scored = (
        values.view(-1, group_size)
        for values in (experience.advantages, objective.kl_coefficient * kl, experience.scored)
    )
    return replace(experience, advantages=less_penalty(advantages, penalty, scored, objective.comparison).flatten())


def _metrics(
    totals: dict[str, Tensor], *, num_tokens: Tensor, num_kept: Tensor, num_updates: int, reference: bool
) -> dict[str, Tensor]:
    """Means per token: the surrogate's over the tokens that carry it, the KL to the reference over all that count.

    What was not measured is absent: the KL without a reference pass, the surrogate's where no token carries it.
    """
    names = {
        "policy/clipped_low_share": "clipped_low",
        "policy/clipped_high_share": "clipped_high",
        "policy/ratio": "ratio",
        "policy/kl_old": "k3",
        "policy/kl_ref": "kl_ref",
    }
    zero = torch.zeros_like(num_tokens)
    sums = [num_tokens, num_kept, *(totals.get(total, zero) for total in (*names.values(), "loss"))]
    num_tokens, num_kept, *sums, loss = ranks.mean(torch.stack([value.double() for value in sums]))
    found = {"train/loss": loss / num_updates, "train/grad_norm": totals["grad_norm"] / num_updates}
    for (name, total), value in zip(names.items(), sums, strict=True):
        count = num_tokens if total == "kl_ref" else num_kept
        if count > 0 and (reference or total != "kl_ref"):
            found[name] = value / (count * num_updates)
    return found
