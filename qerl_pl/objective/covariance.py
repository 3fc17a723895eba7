"""Holding back the tokens that take the entropy down: Clip-Cov and KL-Cov (arXiv 2505.22617).

To first order an update changes the entropy by minus the covariance of log-probability and advantage over tokens, and a
few tokens make most of it. B rows, S tokens; log-probabilities are in nats.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from qerl_pl.common.finite import require_finite, require_no_nan


@dataclass(frozen=True)
class CovarianceControl:
    """Which tokens are held back, and how. Costs a forward pass before the first update.

    Covariances are those before the first update, over the rollouts of all ranks; the published code takes each
    micro-batch by itself, with the policy as it is by then.

    Args:
        kind: "clip": tokens drawn at random between the bounds lose their gradient (Clip-Cov). "kl": those of the
            largest covariance pay ``coefficient`` x KL(old || new) (KL-Cov), estimated by new / old - 1 - log(new /
            old), which is 0 in the first optimizer step of a rollout. The published code pays abs(log(new / old)) and
            has no clip bounds beside it: the gradient of that is of full size for a change that is rounding alone.
        share: of all tokens, at least one.
        low: lower bound of a token's covariance, for "clip".
        high: its upper bound, .inf for none, for "clip".
        coefficient: of the penalty, for "kl".

    Raises:
        ValueError: a value is out of its range.
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
    """(log p - its mean) x (A - its mean) of each token, whose mean is the covariance.

    Args:
        logprobs: [B, S] nats.
        advantages: [B].
        mean_logprob: [] over the tokens that count, of all ranks.
        mean_advantage: [] likewise: each row as often as it has tokens.

    Returns:
        [B, S] fp64, anything where a token does not count.
    """
    return (logprobs.double() - mean_logprob) * (advantages.double() - mean_advantage).unsqueeze(1)


def held_back_number(num_tokens: int, share: float) -> int:
    """How many tokens a share is: rounded down, at least one."""
    return max(1, int(share * num_tokens))


def largest_threshold(values: Tensor, number: int) -> Tensor:
    """The value that the ``number`` largest of [N] reach, []; +inf where there is none. Ties are all above it."""
    if len(values) == 0:
        return values.new_tensor(math.inf)
    return values.topk(min(number, len(values))).values[-1]
