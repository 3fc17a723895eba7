"""Restrain the tokens that reduce the entropy most: Clip-Cov and KL-Cov (arXiv 2505.22617).

To first order, an update changes the entropy by minus the covariance of log-probability and advantage over tokens, and
a few tokens contribute most of it. B rows, S tokens; log-probabilities are in nats.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from qerl_pl.common.checks import require_finite, require_no_nan


@dataclass(frozen=True)
class CovarianceControl:
    """Settings of covariance control. It costs a forward pass before the first update.

    Covariances (``token_covariance``) are computed before the first update, over the rollouts of all ranks; the code of
    the paper computes them in each micro-batch with the current policy.

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
    """Compute (log p - its mean) x (A - its mean) of each token; the mean over tokens is the covariance.

    Args:
        logprobs: [B, S] nats.
        advantages: [B].
        mean_logprob: [] over the tokens in the loss, of all ranks.
        mean_advantage: [] over the same tokens, so each row counts as often as it has tokens.

    Returns:
        [B, S] fp64, anything at tokens that are not in the loss.
    """
    return (logprobs.double() - mean_logprob) * (advantages.double() - mean_advantage).unsqueeze(1)


def held_back_number(num_tokens: int, share: float) -> int:
    """Convert a share of ``num_tokens`` tokens to a number of tokens: rounded down, at least one."""
    return max(1, int(share * num_tokens))


def largest_threshold(values: Tensor, number: int) -> Tensor:
    """Return the ``number``-th largest of N values, [], a threshold that all equal values reach too; +inf if N is 0."""
    if len(values) == 0:
        return values.new_tensor(math.inf)
    return values.topk(min(number, len(values))).values[-1]
