"""Compare numbers of a rollout with those of earlier rollouts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from scipy.stats import ttest_ind
from torch import Tensor

FAR = 8.0
LEAST_OTHERS = 0.01
"""Probability of all other tokens together below which a token is counted as if they had this much."""
ROUNDING = 1e-6
"""Relative difference below which two means of fp32 numbers are taken for equal."""


class Jump(NamedTuple):
    """Comparison of a value with earlier values."""

    ratio: float
    """Current value divided by the median of the earlier values; 1 if there are too few earlier values."""
    sigmas: float
    """Difference of the current value's logarithm from the median of the earlier logarithms, in robust standard
    deviations (from the median absolute deviation); 0 if there are too few earlier values."""


def jump(value: float, history: Sequence[float], *, floor: float, least: int = 2) -> Jump:
    """Compare a positive value with at least ``least`` earlier ones, by median and median absolute deviation of their
    logarithms; values below ``floor`` are raised to it."""
    if len(history) < least:
        return Jump(1.0, 0.0)
    logs = torch.tensor([value, *history], dtype=torch.float64).clamp(min=floor).log()
    median = logs[1:].quantile(0.5)
    spread = 1.4826 * (logs[1:] - median).abs().quantile(0.5)
    distance = logs[0] - median
    return Jump(distance.exp().item(), (distance / spread.clamp(min=0.1)).item())  # 10 %: few values estimate it badly


def change(now: Sequence[float], before: Sequence[float]) -> float:
    """Return the probability, by Welch's t test, that two samples of group means differ as much as these although their
    groups are of one distribution. Each sample gets the other's mean as one further value, so that a few equal values
    are no certainty."""
    first, second = (torch.tensor(values, dtype=torch.float64) for values in (now, before))
    first, second = torch.cat([first, second.mean()[None]]), torch.cat([second, first.mean()[None]])
    values = torch.cat([first, second])
    if values.max() - values.min() <= ROUNDING * values.abs().max():
        return 1.0  # equal constants
    result: Any = ttest_ind(first.numpy(), second.numpy(), equal_var=False)
    return float(result.pvalue)


def far_share(log_ratio: Tensor) -> float:
    """Return the share of tokens whose probabilities in trainer and sampler differ by a factor of more than ``FAR``.

    By Chebyshev's inequality at most E[r^2] / log(FAR)^2 of the tokens have such a log-ratio r: below 1e-4 for a
    correct engine, whose r is 0.02 in root mean square; each altered token usually is one.
    """
    return (log_ratio.abs() > math.log(FAR)).double().mean().item() if len(log_ratio) else 0.0


def logit_gap(trainer: Tensor, sampler: Tensor) -> Tensor:
    """Return the difference between two log-probabilities [N] of a token, in nats, as a difference of logits [N], at
    most 1, so that no token decides alone.

    If the logits z_v of two implementations differ by e_v, then the log-probability of token y differs by about sum_v
    p_v (e_y - e_v): 1 - p_y times a mean of differences of the errors. Divided by 1 - p_y, differences are therefore of
    one size for all tokens, whatever the entropy is. What changes log-probabilities themselves, such as rounding them,
    is not: it shows at the tokens that the policy is nearly certain of.
    """
    others = torch.maximum(-trainer.expm1(), -sampler.expm1()).clamp(min=LEAST_OTHERS)
    return ((trainer - sampler).abs() / others).clamp(max=1.0)


def high_gap(row_gaps: Tensor) -> float:
    """Return the gap that a thirty-second of the rows reach, at least two, given the mean |log-ratio| of each row."""
    return row_gaps.sort(descending=True).values[min(max(2, -(-len(row_gaps) // 32)), len(row_gaps)) - 1].item()
