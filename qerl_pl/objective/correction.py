"""Measure the difference between the token probabilities of the trainer and of the sampler (the rollout engine), and
correct it with importance weights.

All functions take log(trainer / sampler), in nats, at the sampled tokens, for the trainer's policy before its first
optimizer step on the rollout; the ratio in the surrogate loss covers later changes. Shapes: B rows (one completion
each), S token positions.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from qerl_pl.common.checks import require_finite, require_no_nan
from qerl_pl.objective.losses import MAX_LOG_RATIO

Mode = Literal["none", "truncate", "mask"]
Level = Literal["token", "sequence", "geometric"]


@dataclass(frozen=True)
class Rejection:
    """Settings that leave whole completions out of the loss if trainer and sampler differ too much on them, in addition
    to importance weights per token.

    Weights per token bound the influence of single tokens. However, if the probabilities differ a little at every token
    of a completion, the differences add up, and the trainer may be very unlikely to sample the whole completion. Such
    completions are rejected.

    Args:
        level: the quantity that is bounded: the ratio of trainer to sampler probability of the whole completion
            ("sequence", whose spread grows with the length), or the geometric mean of its tokens' ratios ("geometric").
        low: lower bound of the ratio, at most 1; null: 0.5 for a "sequence", 0.99 for "geometric".
        high: upper bound, at least 1, .inf for none; null: 2 for a "sequence", 1.01 for "geometric".

    Raises:
        ValueError: not 0 <= low <= 1 <= high, or low = high.
    """

    level: Literal["sequence", "geometric"] = "geometric"
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        low, high = REJECTION_BOUNDS[self.level]
        object.__setattr__(self, "low", low if self.low is None else self.low)
        object.__setattr__(self, "high", high if self.high is None else self.high)
        require_finite("model.objective.rejection", low=self.low)
        require_no_nan("model.objective.rejection", high=self.high)
        low, high = self.bounds
        if not 0 <= low <= 1 <= high or low == high:
            raise ValueError(
                f"model.objective.rejection has bounds [{low}, {high}]; expected 0 <= low <= 1 <= high and not both 1, "
                "so that completions with equal probabilities are kept"
            )

    @property
    def bounds(self) -> tuple[float, float]:
        """Return lower and upper bound of the ratio, with default values in place of None."""
        assert self.low is not None
        assert self.high is not None
        return self.low, self.high


REJECTION_BOUNDS = {"sequence": (0.5, 2.0), "geometric": (0.99, 1.01)}


class Correction(NamedTuple):
    """Importance weights of a micro-batch, and sums for metrics. A "unit" is a token if every token has its own weight,
    otherwise a whole completion."""

    weights: Tensor
    """[B, S] importance weight of each token: a factor of its loss without gradient, 0 in padding."""
    num_units: Tensor
    """[] number of units with at least one token in the mask."""
    num_outside: Tensor
    """[] number of units whose ratio was outside the bounds, so that it was truncated or masked."""
    weight_sum: Tensor
    """[] sum of the units' weights."""
    square_sum: Tensor
    """[] sum of the units' squared weights."""
    num_rows: Tensor
    """[] number of rows with at least one token in the mask."""
    num_rejected: Tensor
    """[] number of rows whose weights are all 0, because ``Rejection`` leaves them out."""


def importance_weights(
    log_ratio: Tensor,
    mask: Tensor,
    *,
    mode: Mode,
    level: Level = "token",
    low: float = 0.0,
    high: float = 2.0,
    rejection: Rejection | None = None,
) -> Correction:
    """Compute importance weights, which correct the difference between trainer and sampler, from the ratio r of trainer
    to sampler probability.

    Modes: "none": the weight is 1. "truncate": r clamped to [low, high]; with low 0, this is truncated importance
    sampling (Ionides 2008; used for the difference of trainer and sampler by Yao et al. 2025, with high 2). "mask": r
    if it is inside [low, high], else 0, which leaves the token or row out of the loss (IcePop, arXiv 2510.18855, with
    0.5 and 5, at the level "token").

    Levels: "token": every token has its own ratio. "sequence": all tokens of a row have the product of the row's
    ratios, which is the true ratio of the whole completion, but whose variance grows with the length. "geometric": all
    tokens of a row have the n-th root of this product, where n is the number of tokens; it is biased, but its variance
    does not grow with the length.

    Returns a ``Correction``: the weights [B, S], 0 where ``mask`` is False, and sums for metrics.

    Args:
        log_ratio: [B, S] fp32, log r in nats; any value where ``mask`` is False.
        mask: [B, S] bool, True on sampled tokens.
        mode: what is done with the ratio.
        level: which ratio a token has.
        low: lower bound of the ratio.
        high: upper bound of the ratio.
        rejection: a level and bounds: a row whose ratio at this level is outside of them gets weight 0 as a whole; None
            rejects no row.

    Raises:
        ValueError: the shapes differ, or not 0 <= low <= 1 <= high, or "mask" has low = high.
    """
    if log_ratio.ndim != 2 or log_ratio.shape != mask.shape:
        raise ValueError(
            f"log_ratio {tuple(log_ratio.shape)} and mask {tuple(mask.shape)}; expected one [B, S] for both"
        )
    if not 0 <= low <= 1 <= high:
        raise ValueError(f"bounds are [{low}, {high}]; expected 0 <= low <= 1 <= high, so that equal policies weigh 1")
    if mode == "mask" and low == high:
        raise ValueError(f"bounds are [{low}, {high}]; every ratio but exactly 1 is outside: expected low < high")
    ratio, units = _ratio(log_ratio, mask, level)
    outside = units & ((ratio < low) | (ratio > high))
    if mode == "none":
        weights, outside = torch.ones_like(ratio), torch.zeros_like(units)
    elif mode == "truncate":
        weights = ratio.clamp(low, high)
    else:
        weights = torch.where(outside, 0.0, ratio)
    rejected = torch.zeros_like(mask[:, :1])  # [B, 1]
    if rejection is not None:
        of_row, rows = _ratio(log_ratio, mask, rejection.level)
        least, most = rejection.bounds
        rejected = rows & ((of_row < least) | (of_row > most))
    weights = torch.where(units & ~rejected, weights, 0.0)
    per_token = torch.where(mask, weights, 0.0)  # [B, S], whatever the level
    return Correction(
        per_token,
        units.sum(),
        outside.sum(),
        weights.sum(),
        weights.square().sum(),
        mask.any(dim=1).sum(),
        rejected.sum(),
    )


def _ratio(log_ratio: Tensor, mask: Tensor, level: Level) -> tuple[Tensor, Tensor]:
    """Return two tensors that are [B, S] at the level "token" and [B, 1] otherwise: the ratios of trainer to sampler
    probability, fp32, and a bool that is True if ``mask`` has at least one of the tokens to which the ratio belongs."""
    values, units = torch.where(mask, log_ratio.detach(), 0.0), mask
    if level != "token":
        units = mask.any(dim=1, keepdim=True)
        length = mask.sum(dim=1, keepdim=True).clamp(min=1) if level == "geometric" else 1
        values = values.sum(dim=1, keepdim=True) / length
    return values.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), units


def effective_share(num_units: Tensor, weight_sum: Tensor, square_sum: Tensor) -> Tensor:
    """Compute (sum w)^2 / (n sum w^2), the effective sample size of n weights w as a share of n; 0 if all are 0."""
    return weight_sum.square() / (num_units * square_sum).clamp(min=torch.finfo(weight_sum.dtype).tiny)


class Mismatch(NamedTuple):
    """Statistics of log r, the trainer's log-probability of a token minus the sampler's; fp64, NaN without tokens."""

    count: Tensor
    """[] number of tokens; 0 and not NaN if there is none."""
    k1: Tensor
    """[] mean of -log r, nats: an unbiased, noisy estimate of KL(sampler || trainer)."""
    k3: Tensor
    """[] mean of r - 1 - log r, nats: an estimate of KL(sampler || trainer) that is never negative."""
    mean_abs: Tensor
    """[] mean of |log r|, nats."""
    p99: Tensor
    """[] 99th percentile of |log r|, nats (the smallest value that 99 % of the tokens do not exceed)."""
    max: Tensor
    """[] maximum of |log r|, nats."""
    outside_share: Tensor
    """[] share of tokens with r outside [0.9, 1.1]."""


def mismatch(log_ratio: Tensor) -> Mismatch:
    """Compute, from ``log_ratio`` [N], log(trainer / sampler) in nats at the N sampled tokens of all ranks, estimates
    of KL(sampler || trainer), and the mean, 99th percentile and maximum of |log_ratio| (see ``Mismatch``). The caller
    has to gather the tokens of all ranks, because percentiles of ranks cannot be averaged. ``log_ratio`` may also be
    the part of the difference that has one cause, such as noise on the sampler's weights."""
    values = log_ratio.detach().double()
    if len(values) == 0:
        nan = values.new_tensor(math.nan)
        return Mismatch(values.new_tensor(0.0), nan, nan, nan, nan, nan, nan)
    size = values.abs().sort().values
    ratio = values.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return Mismatch(
        count=values.new_tensor(len(values)),
        k1=-values.mean(),
        k3=(ratio - 1 - values).mean(),
        mean_abs=size.mean(),
        p99=size[math.ceil(0.99 * len(size)) - 1],
        max=size[-1],
        outside_share=((ratio < 0.9) | (ratio > 1.1)).double().mean(),
    )
