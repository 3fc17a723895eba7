"""The objective of a run as configured by YAML: surrogate, averaging, corrections, KL and entropy terms."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from qerl_pl.common.checks import require_finite, require_no_nan
from qerl_pl.objective.advantages import Baseline
from qerl_pl.objective.correction import Correction, Level, Mode, Rejection, importance_weights
from qerl_pl.objective.covariance import CovarianceControl
from qerl_pl.objective.entropy_control import EntropyControl
from qerl_pl.objective.losses import (
    MAX_LOG_RATIO,
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
from qerl_pl.objective.published import Preset, completed

Surrogate = Literal["clipped", "sequence", "cispo"]
SURROGATES = {"clipped": clipped_policy_loss, "sequence": sequence_policy_loss, "cispo": cispo_policy_loss}


@dataclass(frozen=True)
class Objective:
    """The loss of a run: a published objective by its name, optionally with some settings changed, or a free
    combination.

    ``objective: gspo`` in YAML and ``--model.objective gspo`` are short for ``objective: {preset: gspo}``. A setting of
    null gets a value that follows from the other settings; ``--print_config`` shows all resulting values. "Noise" is
    AQN's, which the engine's norm weights have during a rollout and the trainer's never have.

    Args:
        preset: "dapo", "grpo", "dr_grpo", "gspo" or "cispo". It fixes surrogate, aggregation and baseline, which cannot
            be set to other values, and sets the clip bounds. null: DAPO's loss with the given settings changed.
        surrogate: "clipped" per token (GRPO, DAPO, Dr. GRPO), "sequence" ratio (GSPO), or "cispo".
        aggregation: mean over tokens (DAPO), over sequences (GRPO), or over max_tokens per sequence (Dr. GRPO). null:
            "sequence" with the "sequence" surrogate, else "token".
        clip_low: distance of the ratio's lower bound from 1; null: the surrogate's own (0.2, 3e-4 or none).
        clip_high: distance of the ratio's upper bound from 1; null: the surrogate's own (0.28, 4e-4 or 4).
        max_ratio: two-sided clip: largest ratio where the advantage is negative, more than 1 + clip_high; null: none.
            Not for "cispo", whose bounds hold for both signs.
        baseline: how rewards become advantages inside a group: less its mean and divided by its std ("normalized") or
            by that of the batch ("batch_normalized"), less the mean alone ("centered"), or "leave_one_out". null:
            "centered" with the "constant" aggregation (Dr. GRPO), else "normalized".
        ratio_against: denominator of the surrogate's ratio. "trainer": the trainer's own probabilities before the first
            update, so the ratio starts at 1 and contains no noise. "sampler": the engine's probabilities, noise
            included, which is Algorithm 1 of arXiv 2510.11696 to the letter (its old policy is the noisy one): the clip
            bounds then act on the difference between trainer and sampler too.
        correction: importance weights between trainer and sampler: "truncate" clamps the weight to the bounds, "mask"
            sets it to 0 where the ratio is outside of them, "none" corrects nothing (noise included). null: "truncate",
            unless the ratio itself is taken against the "sampler".
        correct_noise: True: the weights correct the whole difference, from kernels and noise together. False keeps the
            effect of noise: rollouts with noise are not corrected at all, because the two causes cannot be separated
            per token without scoring every rollout a second time with clean norms (docs/correctness.md has their
            sizes).
        correction_level: one weight per "token", per "sequence", or per sequence as the "geometric" mean over tokens.
            null: "geometric" with the "sequence" surrogate, whose ratio has that form, else "token".
        correction_low: lower bound of a weight, from 0 to 1.
        correction_high: upper bound of a weight, at least 1; .inf: none.
        correction_divisor: the policy loss is averaged over "all" tokens or rows, including masked and rejected ones
            (IcePop's formula: masking makes the step smaller), or over the "kept" ones alone, which costs a forward
            pass before the first update. KL and entropy terms are always averaged over all tokens or rows.
        rejection: bounds on a completion's ratio of trainer to sampler, outside of which the whole completion is left
            out of the loss, in addition to the importance weights; null: none.
        filter_truncated: leave out completions that were cut off at max_tokens (DAPO's overlong filtering).
        kl_coefficient: coefficient of the KL to the base model (adapter disabled); 0 needs no pass of the base.
        kl: estimator of the KL. With kl_in "loss": "k3" (GRPO's; its gradient is that of KL(base || policy)) or "k2"
            (that of KL(policy || base)); "k1" has no gradient in expectation there. With kl_in "reward" only "k1",
            because the gradient of "k2" and "k3" vanishes near the base there. null: "k3" or "k1".
        kl_in: a term of the "loss", or subtracted from the "reward": then the KL of a completion, centered in its
            group, is subtracted from the advantage without division by the std of "normalized" (see
            ``qerl_pl.objective.advantages.less_penalty``).
        entropy_coefficient: coefficient of an entropy bonus, which is averaged as the loss is (``aggregation``; as in
            verl, while TRL always takes the mean over tokens). Where the loss is divided by rows times max_tokens
            (dr_grpo), the bonus of a token weighs mean length / max_tokens times as much as in a mean over tokens.
        entropy_control: entropy bonus with an adaptive coefficient in place of entropy_coefficient; costs a forward
            pass before the first update. null: none.
        covariance: restrains the tokens that reduce the entropy most (Clip-Cov, KL-Cov); null: none.
        top_entropy_share: share of the tokens, by entropy over the whole batch, that carry the policy loss.

    Raises:
        ValueError: a value is out of range, or contradicts another.
    """

    preset: Preset | None = None
    surrogate: Surrogate | None = None
    aggregation: Aggregation | None = None
    clip_low: float | None = None
    clip_high: float | None = None
    max_ratio: float | None = None
    baseline: Baseline | None = None
    ratio_against: Literal["trainer", "sampler"] = "trainer"
    correction: Mode | None = None
    correction_level: Level | None = None
    correction_low: float = 0.0
    correction_high: float = 2.0
    correction_divisor: Literal["all", "kept"] = "all"
    correct_noise: bool = True
    rejection: Rejection | None = None
    filter_truncated: bool = False
    kl_coefficient: float = 0.0
    kl: KLKind | None = None
    kl_in: Literal["loss", "reward"] = "loss"
    entropy_coefficient: float = 0.0
    entropy_control: EntropyControl | None = None
    covariance: CovarianceControl | None = None
    top_entropy_share: float = 1.0

    def __post_init__(self) -> None:
        for name, value in completed(vars(self)).items():
            object.__setattr__(self, name, value)
        section = "model.objective"
        require_no_nan(section, clip_low=self.clip_low, clip_high=self.clip_high, correction_high=self.correction_high)
        require_finite(
            section,
            max_ratio=self.max_ratio,
            correction_low=self.correction_low,
            kl_coefficient=self.kl_coefficient,
            entropy_coefficient=self.entropy_coefficient,
            top_entropy_share=self.top_entropy_share,
        )
        self._check_kl()
        for name in ("clip_low", "clip_high", "kl_coefficient"):
            value = getattr(self, name)
            if value is not None and not value >= 0:
                raise ValueError(f"model.objective.{name} is {value}; expected 0 or more")
        if self.max_ratio is not None:
            self._check_max_ratio(self.max_ratio)
        if self.entropy_control is not None and self.entropy_coefficient:
            raise ValueError(
                f"model.objective.entropy_coefficient is {self.entropy_coefficient} and entropy_control is set, which "
                "chooses it; expected one of them"
            )
        self._check_correction()
        self._check_effects()
        if not 0 < self.top_entropy_share <= 1:
            raise ValueError(
                f"model.objective.top_entropy_share is {self.top_entropy_share}; expected more than 0 and at most 1"
            )

    def _check_effects(self) -> None:
        """Refuse settings that are not at their defaults and have no effect with the others."""
        level = "geometric" if self.surrogate == "sequence" else "token"
        kind = None if self.covariance is None else self.covariance.kind
        without: list[tuple[bool, str, dict[str, tuple[object, object]]]] = [
            (
                self.kl_coefficient == 0,
                "kl_coefficient is 0",
                {"kl_in": (self.kl_in, "loss"), "kl": (self.kl, "k3" if self.kl_in == "loss" else "k1")},
            ),
            (
                self.correction == "none",
                "correction is 'none'",
                {
                    "correction_low": (self.correction_low, 0.0),
                    "correction_high": (self.correction_high, 2.0),
                    "correction_level": (self.correction_level, level),
                },
            ),
            (
                kind == "clip",
                "covariance.kind is 'clip'",
                {"covariance.coefficient": (self.covariance and self.covariance.coefficient, 1.0)},
            ),
            (
                kind == "kl",
                "covariance.kind is 'kl'",
                {
                    "covariance.low": (self.covariance and self.covariance.low, 1.0),
                    "covariance.high": (self.covariance and self.covariance.high, 5.0),
                },
            ),
        ]
        for is_so, why, settings in without:
            for name, (value, default) in settings.items() if is_so else ():
                if value != default:
                    raise ValueError(
                        f"model.objective.{name} is {value!r} and {why}, with which it has no effect; leave it out"
                    )

    def _check_correction(self) -> None:
        if not 0 <= self.correction_low <= 1:
            raise ValueError(f"model.objective.correction_low is {self.correction_low}; expected 0 or more, at most 1")
        if not self.correction_high >= 1:
            raise ValueError(
                f"model.objective.correction_high is {self.correction_high}; expected 1 or more: the weight where "
                "trainer and sampler are equal is 1"
            )
        if self.correction == "mask" and self.correction_low == self.correction_high:
            raise ValueError(
                "model.objective.correction_low and correction_high are both 1; every token but those of equal "
                "log-probabilities would leave the loss: set them apart, e.g. 0.5 and 2"
            )
        if self.ratio_against == "sampler" and self.correction != "none":
            raise ValueError(
                f"model.objective.ratio_against is 'sampler' and correction is {self.correction!r}: the ratio would "
                "make up for the sampler a second time; set one of them to its default"
            )
        if self.correction_divisor == "kept" and self.correction != "mask" and self.rejection is None:
            raise ValueError(
                "model.objective.correction_divisor is 'kept' and nothing is left out; expected correction: mask or a "
                "rejection"
            )
        if not self.correct_noise and not self.corrects:
            raise ValueError(
                "model.objective.correct_noise is false and nothing is corrected; expected a correction or a rejection"
            )

    def _check_kl(self) -> None:
        if self.kl_in == "loss" and self.kl == "k1":
            raise ValueError(
                "model.objective.kl is 'k1' and kl_in 'loss': its gradient is zero in expectation, so nothing is held; "
                "expected k3 (GRPO's) or k2, or kl_in: reward"
            )
        if self.kl_in == "reward" and self.kl != "k1":
            raise ValueError(
                f"model.objective.kl is {self.kl!r} and kl_in 'reward': only k1's gradient there is that of the KL ("
                "that of the others vanishes near the base, so nothing is held); expected k1, or kl_in: loss"
            )

    def _check_max_ratio(self, max_ratio: float) -> None:
        if self.surrogate == "cispo":
            raise ValueError(
                f"model.objective.max_ratio is {max_ratio} and surrogate is 'cispo', whose 1 + clip_high holds for "
                "both signs of the advantage; expected null"
            )
        assert self.clip_high is not None
        highest = 1 + self.clip_high
        if not max_ratio > highest:
            raise ValueError(
                f"model.objective.max_ratio is {max_ratio}; expected more than 1 + clip_high = {highest:g}, or null"
            )

    def at_noise(self, sigma: float) -> Objective:
        """Return the objective for a rollout that was sampled with AQN of this standard deviation, see
        ``correct_noise``."""
        if sigma == 0 or self.correct_noise:
            return self
        off: dict[str, Any] = {"correction": "none", "correction_divisor": "all", "rejection": None}
        bounds = {"correction_low": 0.0, "correction_high": 2.0, "correction_level": None}
        return replace(self, **off, **bounds, correct_noise=True)

    @property
    def corrects(self) -> bool:
        """Tell whether importance weights or rejection correct the difference between trainer and sampler."""
        return self.correction != "none" or self.rejection is not None

    def importance(self, log_ratio: Tensor, mask: Tensor) -> Correction:
        """Compute the importance weights for log(trainer / sampler), [B, S] nats, at the tokens of a mask."""
        assert self.correction is not None
        assert self.correction_level is not None
        return importance_weights(
            log_ratio,
            mask,
            mode=self.correction,
            level=self.correction_level,
            low=self.correction_low,
            high=self.correction_high,
            rejection=self.rejection,
        )

    @property
    def averaging(self) -> Aggregation:
        """Return the aggregation, with the default filled in."""
        assert self.aggregation is not None
        return self.aggregation

    @property
    def comparison(self) -> Baseline:
        """Return the baseline, with the default filled in."""
        assert self.baseline is not None
        return self.baseline

    @property
    def kl_estimator(self) -> KLKind:
        """Return the KL's estimator, with the default filled in."""
        assert self.kl is not None
        return self.kl

    @property
    def needs_first_pass(self) -> bool:
        """Tell whether the loss needs log-probabilities or entropies of the whole batch before the first backward
        pass."""
        kl_in_reward = self.kl_coefficient > 0 and self.kl_in == "reward"
        return self.top_entropy_share < 1 or kl_in_reward or self.correction_divisor == "kept" or self.follows_entropy

    @property
    def follows_entropy(self) -> bool:
        """Tell whether the loss depends on the policy's entropy before the update."""
        return self.entropy_control is not None or self.covariance is not None

    @property
    def every_row_counts(self) -> bool:
        """Tell whether completions with advantage 0 have a gradient too, from a KL or entropy term of the loss."""
        bonus = self.entropy_coefficient != 0 or self.entropy_control is not None
        penalty = self.covariance is not None and self.covariance.kind == "kl"
        return bonus or penalty or (self.kl_coefficient > 0 and self.kl_in == "loss")

    def loss(
        self,
        logprobs: Tensor,
        entropy: Tensor,
        *,
        old_logprobs: Tensor,
        ref_logprobs: Tensor | None,
        advantages: Tensor,
        mask: Tensor,
        kept: Tensor,
        importance: Tensor | None,
        divisor: Tensor,
        counted: Tensor | None = None,
        policy_divisor: Tensor | None = None,
        entropy_coefficient: float | None = None,
        penalized: Tensor | None = None,
    ) -> tuple[Tensor, PolicyLoss, Tensor]:
        """Compute the loss of one micro-batch; the sum over micro-batches is the loss of the batch.

        Args:
            logprobs: [B, S] nats under the policy; carries the gradient.
            entropy: [B, S] nats; carries a gradient where there is an entropy bonus.
            old_logprobs: [B, S] nats, the denominator of the surrogate's ratio.
            ref_logprobs: [B, S] nats under the base model; needed by a KL term in the loss.
            advantages: [B] advantage of each row.
            mask: [B, S] bool, tokens in the loss.
            kept: [B, S] bool, tokens of ``mask`` that have a policy loss (all, or those of the highest entropy).
            importance: [B, S] constant importance weights of the tokens; None: 1.
            divisor: [] divisor of the batch's loss, see ``qerl_pl.objective.losses.count_divisor``.
            counted: [B, S] bool, tokens of ``mask`` over which the policy loss is averaged; None: all of them.
            policy_divisor: [] divisor of the policy loss, if it is not ``divisor``.
            entropy_coefficient: adaptive coefficient of ``entropy_control`` on this batch; None: the fixed one.
            penalized: [B, S] bool, tokens with a KL penalty to the old policy (KL-Cov); None: none.

        Returns:
            The loss; the surrogate's own part and counts; the summed KL estimate to the reference in nats.
        """
        weights = policy_weights = row_weights(mask, self.averaging, divisor)
        if counted is not None and policy_divisor is not None:
            policy_weights = row_weights(counted, self.averaging, policy_divisor)
        settings: dict[str, Any] = {"clip_low": self.clip_low, "clip_high": self.clip_high}
        if self.max_ratio is not None:
            settings["max_ratio"] = self.max_ratio
        if self.surrogate == "sequence":
            settings["whole"] = mask
        surrogate = SURROGATES[str(self.surrogate)](
            logprobs, old_logprobs, advantages, kept, policy_weights, importance=importance, **settings
        )
        total, kl_sum = surrogate.loss, torch.zeros_like(surrogate.k1)
        if ref_logprobs is not None:
            kl = kl_estimate(logprobs, ref_logprobs, mask, self.kl_estimator)
            kl_sum = kl.detach().sum()
            if self.kl_in == "loss":
                drift = drift_weights(logprobs, old_logprobs, mask, importance)
                total = total + self.kl_coefficient * weighted_sum(kl * drift, mask, weights)
        if penalized is not None and self.covariance is not None:
            change = torch.where(penalized, logprobs, 0.0) - torch.where(penalized, old_logprobs, 0.0)
            change = change.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            distance = torch.expm1(change) - change  # KL(old || new) at the old policy's tokens
            distance = distance if importance is None else distance * importance
            total = total + self.covariance.coefficient * weighted_sum(distance, penalized, policy_weights)
        bonus = self.entropy_coefficient if entropy_coefficient is None else entropy_coefficient
        if bonus:
            total = total - bonus * weighted_sum(entropy, mask, weights)
        return total, surrogate, kl_sum
