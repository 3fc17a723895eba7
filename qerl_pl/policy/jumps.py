"""Detect sudden changes between rollouts, and differences between the trainer's log-probabilities and the sampler's."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from scipy.stats import ttest_ind
from torch import Tensor

FAR = 8.0
MAX_FAR_SHARE = 1 / 256  # share of tokens; a correct engine has less than 1e-4
LEAST_OTHERS = 0.01
"""Lower bound for the total probability of all tokens other than the sampled one; ``logit_gap`` divides by it."""
ROUNDING = 1e-6
"""Relative difference up to which means of fp32 numbers count as equal."""


def jump(value: float, history: Sequence[float], *, floor: float) -> tuple[float, float]:
    """Compare a positive value of this rollout with the median of those of earlier rollouts, ``history``. Values below
    ``floor`` are raised to it. Returns the ratio of the value to the median, and the difference between the logarithms
    of the two in robust standard deviations (from the median absolute deviation of the logarithms). The ratio is 1 and
    the difference 0 if there are fewer than two earlier values."""
    if len(history) < 2:
        return 1.0, 0.0
    logs = torch.tensor([value, *history], dtype=torch.float64).clamp(min=floor).log()
    median = logs[1:].quantile(0.5)
    spread = 1.4826 * (logs[1:] - median).abs().quantile(0.5)
    distance = logs[0] - median
    return distance.exp().item(), (distance / spread.clamp(min=0.1)).item()  # 10 %: few values estimate it badly


def change(now: Sequence[float], before: Sequence[float]) -> float:
    """Return the p-value of Welch's t test of whether two samples have the same mean; 1 if all values are equal up to
    fp32 rounding. Each value is a statistic of one group of completions, such as their mean length. The mean of each
    sample is added to the other sample as one more value. Without this, the variance of a few equal values would be 0,
    and any difference would count as certain."""
    first, second = (torch.tensor(values, dtype=torch.float64) for values in (now, before))
    first, second = torch.cat([first, second.mean()[None]]), torch.cat([second, first.mean()[None]])
    values = torch.cat([first, second])
    if values.max() - values.min() <= ROUNDING * values.abs().max():
        return 1.0  # equal constants
    result: Any = ttest_ind(first.numpy(), second.numpy(), equal_var=False)
    return float(result.pvalue)


def apart(now: Sequence[float], ranges: Sequence[Sequence[float]]) -> float:
    """Return the probability that chance alone puts all values of a rollout, ``now``, above or below all values of the
    rollouts just before it. ``ranges`` has the lowest value, the highest value and the number of values of each earlier
    rollout, oldest first. ``now`` is compared with the latest rollouts only: as many as have, all together, only values
    below or only values above those of ``now``; if there are none, the result is 1. If their N values and the n values
    of ``now`` are drawn from one distribution, every choice of n out of the N + n values is equally likely to be
    ``now``, so the probability is 2 / binomial(N + n, n)."""
    probability, lowest, highest, number = 1.0, math.inf, -math.inf, 0
    for low, high, count in reversed(ranges):
        lowest, highest, number = min(lowest, low), max(highest, high), number + int(count)
        distance = max(min(now) - highest, lowest - max(now))
        if distance <= ROUNDING * max(map(abs, (*now, lowest, highest))):
            break
        probability = 2 / math.comb(number + len(now), len(now))
    return probability


def far_share(log_ratio: Tensor) -> float:
    """Return the share of tokens whose probabilities in trainer and sampler differ by a factor of more than 8
    (``FAR``). ``log_ratio`` [N] is the difference of the two log-probabilities of each token, in nats.

    By Chebyshev's inequality, the share is at most E[r^2] / log(8)^2 for log-ratios r: below 1e-4 for a correct engine,
    whose r is 0.02 in root mean square. If a token is altered after sampling, its probability in the trainer usually
    differs by more than this factor.
    """
    return (log_ratio.abs() > math.log(FAR)).double().mean().item() if len(log_ratio) else 0.0


def logit_gap(trainer: Tensor, sampler: Tensor) -> Tensor:
    """Estimate, for each of N tokens, how much the logits of trainer and sampler differ, from their log-probabilities
    of the token, [N] each in nats. Returns absolute differences [N]; those above 1 are set to 1, so that a few tokens
    do not dominate a mean.

    If the logits z_v of two implementations differ by e_v, then the log-probability of token y differs by about sum_v
    p_v (e_y - e_v), which is 1 - p_y times a mean of differences of the errors. Divided by 1 - p_y, it depends on the
    errors of the logits only, and not on how certain the policy is. Errors of the log-probabilities themselves, such as
    their rounding, become large, and visible, where p_y is near 1.
    """
    others = torch.maximum(-trainer.expm1(), -sampler.expm1()).clamp(min=LEAST_OTHERS)
    return ((trainer - sampler).abs() / others).clamp(max=1.0)


def high_gap(row_gaps: Tensor) -> float:
    """Return the largest number that the gaps of at least 1/32 of the rows, and of at least two rows, reach or exceed,
    so that a single row with a large gap does not raise the result. ``row_gaps`` [B] has one gap for each of B
    completions: the mean over its tokens of the absolute difference between the trainer's and the sampler's
    log-probability, in nats."""
    return row_gaps.sort(descending=True).values[min(max(2, -(-len(row_gaps) // 32)), len(row_gaps)) - 1].item()
