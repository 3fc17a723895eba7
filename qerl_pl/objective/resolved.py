"""The settings of a run's loss, with values in place of nulls and functions in place of names (``Objective.resolve``
makes them from the user's settings), and the loss of one micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from qerl_pl.common.checks import require_finite, require_no_nan
from qerl_pl.objective.advantages import AdvantageFunction, Baseline
from qerl_pl.objective.correction import Correction, Level, Mode, Rejection, importance_weights
from qerl_pl.objective.losses import (
    Aggregation,
    KLKind,
    PolicyLoss,
    cispo_policy_loss,
    clipped_policy_loss,
    drift_weights,
    kl_estimate,
    row_weights,
    sequence_policy_loss,
    weighted_sum,
)
from qerl_pl.objective.teacher import TeacherTerm


class LossInputs(NamedTuple):
    """Tensors from which the loss of one micro-batch of B rows and S token positions is computed.

    ``mask`` selects all tokens in the loss, which have KL, entropy and teacher terms. Of these, ``kept`` selects the
    tokens that also have a policy loss: all, or those with the highest entropies. The sum of the policy losses is
    divided by the number of tokens or rows in ``counted``, which may leave out tokens whose importance weight is 0.
    """

    logprobs: Tensor
    """[B, S] fp32 nats, log-probabilities of the tokens under the policy; carries the gradient."""
    entropy: Tensor
    """[B, S] fp32 nats, entropies of the policy; carries a gradient if the loss has an entropy bonus."""
    old_logprobs: Tensor
    """[B, S] fp32 nats, the denominator of the surrogate's ratio, as log-probability."""
    advantages: Tensor
    """[B] fp32."""
    mask: Tensor
    """[B, S] bool, tokens in the loss."""
    kept: Tensor
    """[B, S] bool, tokens that have a policy loss."""
    divisor: Tensor
    """[] divisor of KL, entropy and teacher terms, counted over the whole mini-batch by ``losses.count_divisor``."""
    counted: Tensor
    """[B, S] bool, tokens over which the policy loss is averaged."""
    policy_divisor: Tensor
    """[] divisor of the policy loss, counted over the whole mini-batch."""
    importance: Tensor | None = None
    """[B, S] fp32, constant importance weights; None: 1."""
    ref_logprobs: Tensor | None = None
    """[B, S] fp32 nats under the reference policy; needed for a KL term in the loss."""
    teacher_logprobs: Tensor | None = None
    """[B, S] fp32 nats under the teacher; needed for the teacher term "sampled"."""
    teacher_divergence: Tensor | None = None
    """[B, S] fp32 nats, divergence of policy and teacher over the whole vocabulary; carries a gradient; needed for
    teacher terms other than "sampled"."""


@dataclass(frozen=True)
class ResolvedObjective:
    """The settings of ``Objective``, with values in place of nulls and functions in place of import paths, and the loss
    that they define.
    """

    surrogate: Callable[..., PolicyLoss]
    aggregation: Aggregation
    clip_low: float | None
    clip_high: float | None
    max_ratio: float | None
    baseline: Baseline | AdvantageFunction
    ratio_against: Literal["trainer", "sampler"]
    correction: Mode
    correction_level: Level
    correction_low: float
    correction_high: float
    correction_divisor: Literal["all", "kept"]
    correct_noise: bool
    rejection: Rejection | None
    filter_truncated: bool
    kl_coefficient: float
    kl: KLKind
    kl_in: Literal["loss", "reward"]
    entropy_coefficient: float
    top_entropy_share: float
    teacher: TeacherTerm | None

    def __post_init__(self) -> None:
        section = "model.objective"
        require_no_nan(section, clip_low=self.clip_low, clip_high=self.clip_high, correction_high=self.correction_high)
        finite = ("max_ratio", "correction_low", "kl_coefficient", "entropy_coefficient", "top_entropy_share")
        require_finite(section, **{name: getattr(self, name) for name in finite})
        for fault in (*self._out_of_range(), *self._contradictions(), *self._without_effect()):
            raise ValueError(f"{section}.{fault}")

    def _out_of_range(self) -> Iterator[str]:
        for name in ("clip_low", "clip_high", "kl_coefficient"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                yield f"{name} is {value}; expected 0 or more"
        if self.max_ratio is not None and self.surrogate is cispo_policy_loss:
            yield (
                f"max_ratio is {self.max_ratio} and surrogate is 'cispo', whose 1 + clip_high holds for both signs of "
                "the advantage; expected null"
            )
        elif self.max_ratio is not None and not self.max_ratio > (highest := 1 + (self.clip_high or 0.0)):
            yield f"max_ratio is {self.max_ratio}; expected more than 1 + clip_high = {highest:g}, or null"
        if not 0 <= self.correction_low <= 1:
            yield f"correction_low is {self.correction_low}; expected 0 or more, at most 1"
        if not self.correction_high >= 1:
            yield (
                f"correction_high is {self.correction_high}; expected 1 or more: the weight where trainer and sampler "
                "are equal is 1"
            )
        if not 0 < self.top_entropy_share <= 1:
            yield f"top_entropy_share is {self.top_entropy_share}; expected more than 0 and at most 1"

    def _contradictions(self) -> Iterator[str]:
        if self.kl_in == "loss" and self.kl == "k1":
            yield (
                "kl is 'k1' and kl_in 'loss': its gradient is zero in expectation, so the term would have no "
                "effect; expected k3 (GRPO's) or k2, or kl_in: reward"
            )
        if self.kl_in == "reward" and self.kl != "k1":
            yield (
                f"kl is {self.kl!r} and kl_in 'reward', where only k1 gives the gradient of the KL (that of k2 and k3 "
                "vanishes near the reference, so the term would have no effect); expected k1, or kl_in: loss"
            )
        if self.correction == "mask" and self.correction_low == self.correction_high:
            yield (
                "correction_low and correction_high are both 1; every token whose two log-probabilities differ would "
                "leave the loss: set them apart, e.g. 0.5 and 2"
            )
        if self.ratio_against == "sampler" and self.correction != "none":
            yield (
                f"ratio_against is 'sampler' and correction is {self.correction!r}: the ratio and the weight "
                "would both correct the difference to the sampler; set one of them to its default"
            )
        if self.correction_divisor == "kept" and self.correction != "mask" and self.rejection is None:
            yield "correction_divisor is 'kept' and nothing is left out; expected correction: mask or a rejection"
        if not self.correct_noise and not self.corrects:
            yield "correct_noise is false and nothing is corrected; expected a correction or a rejection"

    def _without_effect(self) -> Iterator[str]:
        """Yield an error message for each setting that is not at its default and has no effect in combination with the
        other settings."""
        unused: dict[str, dict[str, Any]] = {}
        if self.kl_coefficient == 0:
            unused["kl_coefficient is 0"] = {"kl_in": "loss", "kl": "k3" if self.kl_in == "loss" else "k1"}
        if self.correction == "none":
            unused["correction is 'none'"] = self._usual_bounds
        for why, defaults in unused.items():
            for name, default in defaults.items():
                if (value := getattr(self, name)) != default:
                    yield f"{name} is {value!r} and {why}, with which it has no effect; leave it out"

    @property
    def _usual_bounds(self) -> dict[str, Any]:
        level = "geometric" if self.surrogate is sequence_policy_loss else "token"
        return {"correction_low": 0.0, "correction_high": 2.0, "correction_level": level}

    def at_noise(self, sigma: float) -> ResolvedObjective:
        """Return the objective for one rollout, which the engine sampled with noise of standard deviation ``sigma`` on
        its norm weights (AQN; 0: without noise). If there was noise and ``correct_noise`` is False, the returned
        objective has no importance weights and no rejection, so that the loss keeps the effect of the noise."""
        if sigma == 0 or self.correct_noise:
            return self
        off: dict[str, Any] = {"correction": "none", "correction_divisor": "all", "rejection": None}
        return replace(self, **off, **self._usual_bounds, correct_noise=True)

    def at_rollout(self, index: int) -> ResolvedObjective:
        """Return the objective of the RL iteration ``index``, counted from 0, with the coefficient that the teacher's
        term has in this iteration."""
        return self if self.teacher is None else replace(self, teacher=self.teacher.at(index))

    @property
    def corrects(self) -> bool:
        """Whether importance weights or rejection correct the difference between trainer and sampler."""
        return self.correction != "none" or self.rejection is not None

    @property
    def needs_first_pass(self) -> bool:
        """Whether the loss of a micro-batch depends on log-probabilities or entropies of the whole rollout, which
        forward passes then compute before the first backward pass."""
        kl_in_reward = self.kl_coefficient > 0 and self.kl_in == "reward"
        return self.top_entropy_share < 1 or kl_in_reward or self.correction_divisor == "kept"

    @property
    def every_row_counts(self) -> bool:
        """Whether completions with advantage 0 have a gradient too, by a KL, entropy or teacher term of the loss."""
        bonus = self.entropy_coefficient != 0 or self.teacher is not None
        return bonus or (self.kl_coefficient > 0 and self.kl_in == "loss")

    def importance(self, log_ratio: Tensor, mask: Tensor) -> Correction:
        """Compute the importance weights at the tokens of ``mask`` from log(trainer / sampler) [B, S], in nats."""
        return importance_weights(
            log_ratio,
            mask,
            mode=self.correction,
            level=self.correction_level,
            low=self.correction_low,
            high=self.correction_high,
            rejection=self.rejection,
        )

    def loss(self, inputs: LossInputs) -> tuple[Tensor, PolicyLoss, Tensor]:
        """Compute the loss of one micro-batch; the sum over a mini-batch is the loss of its optimizer step. Returns the
        whole loss []; a ``PolicyLoss`` with the policy loss alone and sums for its metrics; and the sum [] over tokens
        of the estimated KL to the reference, in nats.
        """
        logprobs, old_logprobs, importance = inputs.logprobs, inputs.old_logprobs, inputs.importance
        weights = row_weights(inputs.mask, self.aggregation, inputs.divisor)
        policy_weights = row_weights(inputs.counted, self.aggregation, inputs.policy_divisor)
        bounds = {"clip_low": self.clip_low, "clip_high": self.clip_high, "max_ratio": self.max_ratio}
        settings: dict[str, Any] = {name: value for name, value in bounds.items() if value is not None}
        if self.surrogate not in (clipped_policy_loss, cispo_policy_loss):
            settings["whole"] = inputs.mask
        surrogate = self.surrogate(
            logprobs, old_logprobs, inputs.advantages, inputs.kept, policy_weights, importance=importance, **settings
        )
        total, kl_sum = surrogate.loss, torch.zeros_like(surrogate.k1)
        if inputs.ref_logprobs is not None:
            kl = kl_estimate(logprobs, inputs.ref_logprobs, inputs.mask, self.kl)
            kl_sum = kl.detach().sum()
            if self.kl_in == "loss":
                drift = drift_weights(logprobs, old_logprobs, inputs.mask, importance)
                total = total + self.kl_coefficient * weighted_sum(kl * drift, inputs.mask, weights)
        if self.teacher is not None:
            total = total + self.teacher.coefficient * weighted_sum(self._to_teacher(inputs), inputs.mask, weights)
        if self.entropy_coefficient:
            total = total - self.entropy_coefficient * weighted_sum(inputs.entropy, inputs.mask, weights)
        return total, surrogate, kl_sum

    def _to_teacher(self, inputs: LossInputs) -> Tensor:
        """Compute the divergence from the teacher at each token, [B, S] nats.

        Let p be the policy's and q the teacher's probability. If the setting ``divergence`` is "sampled", the result is
        (log p - log q)^2 / 2 at the sampled tokens. Its gradient is (log p - log q) grad log p, that of a policy loss
        whose advantage is log q - log p. The square is multiplied by importance weights, because an older policy
        sampled the tokens (``drift_weights``). The other divergences, over the whole vocabulary, depend only on the
        preceding tokens, and need no weights.
        """
        if inputs.teacher_divergence is not None:
            return inputs.teacher_divergence
        assert inputs.teacher_logprobs is not None
        drift = drift_weights(inputs.logprobs, inputs.old_logprobs, inputs.mask, inputs.importance)
        return drift * kl_estimate(inputs.logprobs, inputs.teacher_logprobs, inputs.mask, "k2")
