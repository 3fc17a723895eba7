"""Compare numbers of a rollout with those of earlier rollouts."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from scipy.stats import ttest_ind
from torch import Tensor

FAR = 8.0
MAX_FAR_SHARE = 1 / 256  # share of tokens; a correct engine has less than 1e-4
LEAST_OTHERS = 0.01
"""Lower bound for the total probability of all other tokens in ``logit_gap``; smaller values are raised to it."""
ROUNDING = 1e-6
"""Relative difference up to which means of fp32 numbers count as equal."""


class Jump(NamedTuple):
    """Comparison of a value with earlier values."""

    ratio: float
    """Current value divided by the median of the earlier values; 1 if there are too few earlier values."""
    sigmas: float
    """Difference of the current value's logarithm from the median of the earlier logarithms, in robust standard
    deviations (from the median absolute deviation); 0 if there are too few earlier values."""


def jump(value: float, history: Sequence[float], *, floor: float, least: int = 2) -> Jump:
    """Compare a positive value with the earlier values in ``history``, by the median and the median absolute deviation
    of their logarithms. Values below ``floor`` count as ``floor``; with fewer than ``least`` earlier values, the result
    says that there is no difference."""
    if len(history) < least:
        return Jump(1.0, 0.0)
    logs = torch.tensor([value, *history], dtype=torch.float64).clamp(min=floor).log()
    median = logs[1:].quantile(0.5)
    spread = 1.4826 * (logs[1:] - median).abs().quantile(0.5)
    distance = logs[0] - median
    return Jump(distance.exp().item(), (distance / spread.clamp(min=0.1)).item())  # 10 %: few values estimate it badly


def change(now: Sequence[float], before: Sequence[float]) -> float:
    """Return the p-value of Welch's t test for two samples of group means. The mean of each sample is added to the
    other sample as one more value, so that a sample of a few equal values, with variance 0, does not make a difference
    certain."""
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
    correct engine, whose r is 0.02 in root mean square. A token that was altered after sampling usually counts.
    """
    return (log_ratio.abs() > math.log(FAR)).double().mean().item() if len(log_ratio) else 0.0


def logit_gap(trainer: Tensor, sampler: Tensor) -> Tensor:
    """Estimate, from two log-probabilities in nats of each of N tokens, the absolute difference of the logits that
    causes their difference: [N], at most 1, so that no single token decides.

    If the logits z_v of two implementations differ by e_v, then the log-probability of token y differs by about sum_v
    p_v (e_y - e_v): 1 - p_y times a mean of differences of the errors. Divided by 1 - p_y, differences therefore have
    the same size for all tokens, whatever the entropy is. Errors of the log-probabilities themselves, such as their
    rounding, do not scale with 1 - p_y, so they show at tokens of which the policy is nearly certain.
    """
    others = torch.maximum(-trainer.expm1(), -sampler.expm1()).clamp(min=LEAST_OTHERS)
    return ((trainer - sampler).abs() / others).clamp(max=1.0)


def high_gap(row_gaps: Tensor) -> float:
    """Return the largest gap that at least 1/32 of the rows, and at least two rows, have or exceed, so that one bad row
    does not decide. ``row_gaps`` are the rows' mean |log-ratio| in nats."""
    return row_gaps.sort(descending=True).values[min(max(2, -(-len(row_gaps) // 32)), len(row_gaps)) - 1].item()
