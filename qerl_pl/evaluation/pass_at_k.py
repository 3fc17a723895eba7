"""Compute pass@k and avg@n (mean accuracy) from n completions of each of P problems, and confidence intervals."""

import math

import torch
from torch import Tensor

Z = 1.959964  # a standard normal variable is within +-Z with a probability of 95 %


def pass_at_k(num_correct: Tensor, n: int, k: int) -> Tensor:
    """Estimate without bias, for each of P problems, the probability that at least one of k completions is right, [P]
    fp64.

    ``num_correct`` [P] int64 is the number c of right completions among n. The estimate is 1 - C(n - c, k) / C(n, k)
    (arXiv 2107.03374, eq. 1); for k = 1 it is c / n, avg@n. Raises ValueError if k is not in 1 to n, or an element of
    ``num_correct`` is not in 0 to n.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@{k} cannot be computed from {n} completions; expected k from 1 to {n}")
    if len(num_correct) and not 0 <= int(num_correct.min()) <= int(num_correct.max()) <= n:
        raise ValueError(f"a problem has {num_correct.tolist()} right completions; expected 0 to {n}")
    # C(n - c, k) / C(n, k) is the product of (n - c - i) / (n - i) over i < k; the factorials would overflow.
    steps = torch.arange(k, dtype=torch.float64, device=num_correct.device)  # [k]
    wrong = (n - num_correct.double()).unsqueeze(1)  # [P, 1]
    return 1 - ((wrong - steps).clamp(min=0) / (n - steps)).prod(dim=1)


def accuracy(num_correct: Tensor, n: int) -> dict[str, Tensor]:
    """Compute avg@n and pass@k of each of P problems, where n completions per problem were sampled and ``num_correct``
    [P] int64 of them are right. Returns a dict from names, such as "avg@8" and "pass@4", to tensors [P] fp64. k is 2,
    4, 8, ... below n, and n; with n = 1 there is only "avg@1"."""
    powers = {2**power for power in range(1, n.bit_length())}
    return {f"avg@{n}": pass_at_k(num_correct, n, 1)} | {
        f"pass@{k}": pass_at_k(num_correct, n, k) for k in sorted(powers | {n} - {1})
    }


def score_interval(values: Tensor, n: int) -> tuple[float, float]:
    """Compute the 95 % interval of the mean over problems of avg@n or pass@k, whose ``values`` [P] are one number from
    0 to 1 per problem, computed from ``n`` completions each. Returns its lower and upper end.

    It is Wilson's score interval. That is an interval for binary values, so P is replaced by the number of binary
    values of the same mean whose mean would have the same variance: P if n is 1, at most P n. Unlike a bootstrap
    interval or mean +- 1.96 standard errors, it is not a single point if no problem is solved, or all are.
    """
    mean, number = values.double().mean().item(), float(len(values))
    if 0 < mean < 1:
        of_binary = mean * (1 - mean)
        number *= of_binary / max(values.double().var(correction=0).item(), of_binary / n)
    centre = mean + Z**2 / (2 * number)
    half = Z * math.sqrt(mean * (1 - mean) / number + (Z / (2 * number)) ** 2)
    scale = 1 + Z**2 / number
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)
