"""Update the policy on the experience of one rollout. Shapes: B rows (a prompt and its completion each), S tokens of
the longest row."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from qerl_pl.common.metrics import Stopwatch
from qerl_pl.common.types import Experience
from qerl_pl.objective import LossInputs, ResolvedObjective
from qerl_pl.objective.advantages import less_penalty
from qerl_pl.objective.losses import kl_estimate
from qerl_pl.policy.policy import Policy
from qerl_pl.policy.teacher import Teacher
from qerl_pl.training.metrics import correction_metrics, gap_metrics, teacher_metrics, update_metrics
from qerl_pl.training.passes import Batch, UpdateSettings
from qerl_pl.training.routing import checked_routing
from qerl_pl.training.terms import BatchTerms, batch_terms


@dataclass(frozen=True)
class UpdateReport:
    """Metrics of all updates on one rollout, and the tensors that they were computed with."""

    metrics: dict[str, Tensor]
    """Metrics of the update by name, [] each, over the rows of all ranks."""
    old_logprobs: Tensor
    """[B, S] fp32 nats: the trainer's log-probabilities before its first update, 0 where nothing was sampled."""
    entropy: Tensor
    """[B, S] fp32 nats: the policy's entropies before its first update, 0 where nothing was sampled."""
    teacher_logprobs: Tensor | None
    """[B, S] fp32 nats: the teacher's log-probabilities, 0 where nothing was sampled; None without a teacher."""
    experience: Experience
    """The rollout's tensors on the policy's device. If the objective subtracts the KL from the reward (``kl_in:
    reward``), this penalty is already subtracted from the advantages."""
    with_gradient: Tensor
    """[B] bool, True for rows that had a backward pass: those in the loss whose advantage is not 0, or all rows in the
    loss if it has a KL, entropy or teacher term."""
    micro_batch_tokens: int
    """Limit on the tokens per pass at the end of the update: the given one, or less if GPU memory ran out."""


def improve(
    policy: Policy,
    experience: Experience,
    objective: ResolvedObjective,
    settings: UpdateSettings,
    *,
    step: Callable[[], Tensor],
    watch: Stopwatch,
    teacher: Teacher | None = None,
    free_cache: Callable[[], bool] = lambda: False,
) -> UpdateReport:
    """Update the policy on the experience of one rollout (its scored completions as tensors): ``num_updates`` passes
    over it, each of ``num_mini_batches`` optimizer steps.

    The old log-probabilities are those of the trainer before its first update on the rollout. They are taken from the
    first update's forward pass, unless there are several mini-batches or the objective needs them before that pass.
    Rows without a gradient (advantage exactly 0, or left out of the loss) only get a forward pass, for the metrics.

    If GPU memory runs out, all passes of an optimizer step are repeated without the engine's KV cache, with more
    recomputation of activations or with smaller micro-batches, as ``Batch.run`` describes. ``step`` is called only with
    complete gradients, and the losses of micro-batches are divided by the number of tokens or rows of the whole
    mini-batch. So the division into micro-batches changes the update only by rounding.

    Every rank calls this function with its own rows. Ranks may have different numbers of rows and micro-batches,
    because they communicate only before the updates, in ``step``, and for the metrics. In a mixture-of-experts model,
    policy and reference use the experts that the sampler chose, if the experience contains them.

    Args:
        policy: the policy, in training mode.
        experience: B rows, ordered by group (the completions of a prompt).
        objective: the loss.
        settings: settings of the updates.
        step: function that averages the gradients over ranks, clips them, makes the optimizer step and clears the
            gradients; returns their norm before clipping, [].
        watch: stopwatch that measures the phases "teacher", "logprob", "wait" (for slower ranks) and "train".
        teacher: the model that the objective's teacher term needs; None if the objective has no such term.
        free_cache: function that frees the KV cache of the rollout engine, which sleeps, and returns whether it was
            allocated; it is called if GPU memory runs out.

    Raises:
        CheckFailed: before the first optimizer step, if too many of the sampler's experts are not those that the
            policy's routers choose.
    """
    batch = Batch(policy, experience, settings, free_cache=free_cache)
    num_updates, num_mini_batches = settings.num_updates, settings.num_mini_batches
    # The second mini-batch sees an updated policy, so old log-probabilities are computed before the first update.
    first_pass = objective.needs_first_pass or num_mini_batches > 1
    if objective.teacher is not None:
        assert teacher is not None
        with watch.phase("teacher"):
            batch.score_teacher(teacher, objective.teacher.mixture)
    with watch.phase("logprob"):
        with_gradient = _score(batch, objective, everything=first_pass)
    live = batch.rows[with_gradient]
    with watch.phase("wait"):
        terms = batch_terms(batch, objective)
    totals, routing = dict[str, Tensor](), dict[str, Tensor]()
    with watch.phase("train"):
        for update in range(num_updates):
            record = update == 0 and not first_pass
            for index in range(num_mini_batches):
                which = {"rows": live[terms.mini_batch[live] == index], "mini_batch": index, "record": record}
                sums = batch.run(partial(_gradient, batch, objective, terms, **which))
                if update == index == 0:
                    routing = checked_routing(batch)
                for name, value in {**sums, "grad_norm": step()}.items():
                    totals[name] = totals.get(name, 0) + value
    counts = {"num_tokens": batch.experience.mask[live].sum(), "num_kept": terms.kept[live].sum()}
    metrics = update_metrics(totals, batch, **counts)
    metrics |= gap_metrics(batch) | correction_metrics(batch, objective) | teacher_metrics(batch) | routing
    metrics["train/micro_batch_tokens"] = torch.as_tensor(float(batch.budget.tokens))
    return UpdateReport(
        metrics=metrics,
        old_logprobs=batch.old,
        entropy=batch.entropy,
        teacher_logprobs=batch.teacher and batch.teacher.logprobs,
        experience=batch.experience,
        with_gradient=with_gradient,
        micro_batch_tokens=batch.budget.tokens,
    )


def _score(batch: Batch, objective: ResolvedObjective, *, everything: bool) -> Tensor:
    """Run the forward passes without gradient that must precede the first update, and return [B] bool, True for rows
    that need a backward pass.

    If ``everything`` is True, all rows are scored: the loss needs old log-probabilities before the first backward pass,
    or there are several mini-batches, of which the second sees an updated policy. Otherwise only the rows without a
    backward pass are scored, because the others get log-probabilities from the forward pass that precedes their
    backward pass.
    """
    if objective.kl_coefficient > 0:
        batch.score_reference()
    if everything:
        batch.score(batch.rows)
        if objective.kl_in == "reward" and batch.reference is not None:
            batch.experience = _kl_in_reward(batch, batch.reference, objective)
    with_gradient = batch.experience.mask.any(dim=1)
    if not objective.every_row_counts:
        with_gradient &= batch.experience.advantages != 0
    if not everything:
        batch.score(batch.rows[~with_gradient])
    return with_gradient


def _gradient(
    batch: Batch,
    objective: ResolvedObjective,
    terms: BatchTerms,
    max_tokens: int,
    *,
    rows: Tensor,
    mini_batch: int,
    record: bool,
) -> dict[str, Tensor]:
    """Accumulate the gradient of one optimizer step over ``rows``, the indices of those rows of the mini-batch that
    need a backward pass. Returns sums of metrics by name. If ``record``, this is the first pass over these rows, and
    its log-probabilities and entropies are stored in ``batch``."""
    experience = batch.experience
    sums: dict[str, Tensor] = {}
    for part in batch.parts(rows, max_tokens):
        scores = batch.teacher
        stats = batch.token_stats(part, teacher=scores and scores.states_at(part, part.read(experience.sampled)))
        if record:
            batch.record(part, stats)
        mask = part.read(experience.mask)
        old, sampler = part.read(batch.old), part.read(experience.sampler_logprobs)
        inputs = LossInputs(
            logprobs=stats.logprobs,
            entropy=stats.entropy,
            old_logprobs=sampler if objective.ratio_against == "sampler" else old,
            ref_logprobs=None if batch.reference is None else part.read(batch.reference),
            teacher_logprobs=scores and part.read(scores.logprobs),
            teacher_divergence=stats.divergence,
            advantages=experience.advantages[part.rows],
            importance=objective.importance(old - sampler, mask).weights,
            mask=mask,
            kept=part.read(terms.kept),
            counted=part.read(terms.counted),
            divisor=terms.divisors[mini_batch],
            policy_divisor=terms.policy_divisors[mini_batch],
        )
        loss, surrogate, kl = objective.loss(inputs)
        # Backward runs in the calling thread, because handing a small pass to autograd's thread takes longer than the
        # pass. Lightning's manual_backward is not used: with DDP it all-reduces after each micro-batch, and ranks have
        # different numbers of micro-batches.
        with torch.autograd.set_multithreading_enabled(False):
            loss.backward()
        values = {**surrogate._asdict(), "loss": loss.detach(), "kl_ref": kl}
        if stats.divergence is not None and stats.agrees is not None:
            values |= {"divergence": stats.divergence.detach()[mask].sum(), "agrees": stats.agrees[mask].sum()}
        for name, value in values.items():
            sums[name] = sums.get(name, 0) + value
    return sums


def _kl_in_reward(batch: Batch, reference: Tensor, objective: ResolvedObjective) -> Experience:
    experience = batch.experience
    kl = kl_estimate(batch.old, reference, experience.sampled, objective.kl).sum(dim=1)
    advantages, penalty, scored = (
        values.view(-1, batch.settings.group_size)
        for values in (experience.advantages, objective.kl_coefficient * kl, experience.scored)
    )
    return experience._replace(advantages=less_penalty(advantages, penalty, scored, objective.baseline).flatten())
