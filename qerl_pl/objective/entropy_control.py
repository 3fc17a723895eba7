"""Ways to keep the policy's entropy up: an entropy bonus that adapts (Skywork-OR1, arXiv 2505.22312), and restraint of
the tokens that reduce the entropy most, Clip-Cov and KL-Cov (arXiv 2505.22617)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from qerl_pl.common.checks import require_finite, require_no_nan


@dataclass(frozen=True)
class EntropyControl:
    """Keeps the policy's entropy above a target, by an entropy bonus whose coefficient adapts.

    The coefficient starts at 0. If a rollout's entropy is below the target, the bonus acts, and the coefficient grows
    by ``step`` for the next rollout; otherwise the bonus does not act, and the coefficient shrinks. Unlike in the
    paper's formula it stays at 0 or above. Entropy begins above the target, so the paper's coefficient would become
    negative, and the bonus would be a penalty when it is first needed.

    Args:
        target: nats per token, mean over the rollout, at the sampling temperature; the paper uses 0.2.
        step: change of the coefficient per rollout; the paper uses 0.005.

    Raises:
        ValueError: a value is not more than 0.
    """

    target: float = 0.2
    step: float = 0.005

    def __post_init__(self) -> None:
        section = "model.objective.entropy_control"
        require_finite(section, target=self.target, step=self.step)
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"{section}.{name} is {value}; expected more than 0")

    def in_force(self, coefficient: float, entropy: float) -> float:
        """Return the coefficient of the entropy bonus for a rollout of this mean entropy, in nats per token."""
        return coefficient if entropy <= self.target else 0.0

    def following(self, coefficient: float, entropy: float) -> float:
        """Return the coefficient of the next rollout."""
        if entropy == self.target:
            return coefficient
        return max(0.0, coefficient + (self.step if entropy < self.target else -self.step))


@dataclass(frozen=True)
class CovarianceControl:
    """Restrains the tokens that reduce the entropy most. It costs a forward pass before the first update.

    To first order, an update changes the entropy by minus the covariance of log-probability and advantage over tokens,
    and a few tokens contribute most of it. Covariances (``token_covariance``) are computed before the first update,
    over the rollouts of all ranks; the code of the paper computes them in each micro-batch with the current policy.

    Args:
        kind: "clip" removes the gradient of tokens drawn at random among those between the bounds (Clip-Cov). "kl" adds
            ``coefficient`` x KL(old || new) at the tokens of the largest covariance (KL-Cov). The estimate of the KL is
            r - 1 - log r with r = new / old, which is 0 in the first optimizer step of a rollout. The code of the paper
            adds abs(log r) instead, whose gradient has full size even where r differs from 1 by rounding only; it also
            leaves the clip bounds of r out of the surrogate, which is clipped here as in any other run.
        share: share of all tokens that is restrained, at least one token.
        low: lower bound of a token's covariance, for "clip".
        high: upper bound of a token's covariance, .inf for none, for "clip".
        coefficient: coefficient of the penalty, for "kl".

    Raises:
        ValueError: a value is out of range.
    """

    kind: Literal["clip", "kl"] = "clip"
    share: float = 2e-4
    low: float = 1.0
    high: float = 5.0
    coefficient: float = 1.0

    def __post_init__(self) -> None:
        section = "model.objective.covariance"
        require_finite(section, share=self.share, low=self.low, coefficient=self.coefficient)
        require_no_nan(section, high=self.high)
        if not 0 < self.share <= 1:
            raise ValueError(f"{section}.share is {self.share}; expected more than 0 and at most 1")
        if not self.low < self.high:
            raise ValueError(f"{section} has bounds [{self.low}, {self.high}]; expected low < high")
        if not self.coefficient > 0:
            raise ValueError(f"{section}.coefficient is {self.coefficient}; expected more than 0")


def token_covariance(logprobs: Tensor, advantages: Tensor, *, mean_logprob: Tensor, mean_advantage: Tensor) -> Tensor:
    """Compute (log p - its mean) x (A - its mean) of each token, [B, S] fp64, from log p [B, S] nats and A [B]; the
    mean over tokens is the covariance. The means [] are over the tokens in the loss, of all ranks."""
    return (logprobs.double() - mean_logprob) * (advantages.double() - mean_advantage).unsqueeze(1)


def largest_threshold(values: Tensor, share: float, num_tokens: int) -> Tensor:
    """Return the k-th largest of N values, [], which all equal values reach too; k is this share of ``num_tokens``,
    rounded down and at least 1. +inf if N is 0."""
    if len(values) == 0:
        return values.new_tensor(math.inf)
    return values.topk(min(max(1, int(share * num_tokens)), len(values))).values[-1]
