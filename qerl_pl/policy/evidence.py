"""Sequential tests of whether completions are independent draws from the distribution that the engine reports.

Both tests are likelihood-ratio tests. For a distribution p that the engine reports and any other distribution A, the
ratio A(x) / p(x) has mean 1 over draws x from p. The product of such ratios over tokens is therefore a non-negative
martingale of mean 1, and so is a mixture of such products. By Ville's inequality, the probability that this product
ever exceeds 1 / a is at most a, without any assumption about p, about the length of completions, or about how far the
trainer's distribution q is from p. The logarithm of the product, in nats, is called evidence here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

POWERS = (0.5, 0.75, 1.25, 1.5, 2.0, 4.0)
NUCLEI = (0.5, 0.8, 0.9, 0.95, 0.99)
ALTERNATIVES = (*(f"temperature x {1 / power:.2g}" for power in POWERS), *(f"top_p {mass:g}" for mass in NUCLEI))
OUTSIDE = 0.05  # weight of q in an alternative with top_p, so that one token outside the nucleus does not rule it out
COPY_RATES = (0.9, 0.5, 0.1, 0.01, 1e-3)
COPY_SHARES = (1.0, 1 / 16)


def alternative_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute the log-probabilities of tokens under q = softmax(logits) and under K alternatives to q.

    The alternatives are listed in ``ALTERNATIVES``: for each b of ``POWERS``, q^b normalised, that is, q at another
    temperature; for each m of ``NUCLEI``, q with top_p = m, mixed with a share ``OUTSIDE`` of q itself.

    Args:
        logits: [R, V] fp32 or fp64, already divided by the sampling temperature.
        targets: [R] int64 in [0, V).

    Returns:
        [R, 1 + K] in nats, in the dtype of the logits; column 0 is log q.
    """
    log_q = logits.log_softmax(dim=1)
    q, own = log_q.exp(), log_q.gather(1, targets.unsqueeze(1))  # [R, V], [R, 1]

    def total(values: Tensor) -> Tensor:
        return values.sum(dim=1, keepdim=True)

    root, square = q.sqrt(), q.square()
    fourth_root = root.sqrt()  # products of roots instead of ``q.pow``, which is several times slower
    below_one = [total(root), total(root * fourth_root)]
    above_one = [total(q * fourth_root), total(q * root), total(square), total(square.square())]
    masses = zip(POWERS, below_one + above_one, strict=True)
    columns = [own, *(power * own - mass.log() for power, mass in masses)]
    # In descending order of q, a token occupies the part [likelier, at_least] of the interval [0, 1]; tokens of equal q
    # share one part evenly.
    likelier, at_least = (total(q.where(mask, 0)) for mask in (log_q > own, log_q >= own))
    width = (at_least - likelier).clamp(min=torch.finfo(q.dtype).tiny)
    for mass in NUCLEI:
        inside = ((mass - likelier) / width).clamp(0, 1) / mass
        columns.append(own + (OUTSIDE + (1 - OUTSIDE) * inside).log())
    return torch.cat(columns, dim=1)


def accumulated(before: Tensor, evidence: Tensor) -> Tensor:
    """Accumulate the evidence that at this or an earlier rollout, sampling changed from p to an alternative.

    The result is the logarithm of the Shiryaev-Roberts sum over the rollouts at which the change may have begun, M_n =
    (1 + M_{n-1}) exp(evidence_n) (an e-detector, arXiv 2203.03532). M_n - n is a martingale under draws from p, so the
    probability that M exceeds c within the first n rollouts is at most n / c.

    Args:
        before: [K] log M_{n-1}; -inf before the first rollout.
        evidence: [K] sums of log A - log p over the tokens of this rollout, in nats.

    Returns:
        [K] log M_n.
    """
    return torch.logaddexp(torch.zeros_like(before), before) + evidence


def copy_evidence(draws: Iterable[tuple[int, int, int, float]]) -> Tensor:
    """Compute the evidence that completions are copies of each other and not independent draws.

    Let p(x) be the policy's probability of completion x. The null hypothesis is that all completions are independent
    draws from p. In each alternative hypothesis, for a share s of the prompts (``COPY_SHARES``), a completion repeats
    an earlier completion of the same prompt with probability r (``COPY_RATES``), and is a draw from p otherwise. The
    evidence is the logarithm of the likelihood ratio of the alternative to the null hypothesis. Under the null
    hypothesis the mean of 1{x equals a given earlier completion} / p(x) is 1, so this likelihood ratio is a martingale
    as the others of this module are. Equal completions add almost no evidence if p(x) is nearly 1, because then they
    are expected.

    Args:
        draws: one tuple per completion: an int that identifies its prompt; the number of earlier completions of this
            prompt; the number of these that equal this completion; and this completion's log-probability in nats.

    Returns:
        Evidence for each pair of s and r, [len(COPY_SHARES) * len(COPY_RATES)] fp64 in nats.
    """
    seen = [draw for draw in draws if draw[1]]
    if not seen:
        return torch.zeros(len(COPY_SHARES) * len(COPY_RATES), dtype=torch.float64)
    _, group = torch.tensor([draw[0] for draw in seen]).unique(return_inverse=True)
    earlier, equal, logprob = torch.tensor([draw[1:] for draw in seen], dtype=torch.float64).unbind(dim=1)
    rates = torch.tensor(COPY_RATES, dtype=torch.float64).unsqueeze(1)
    repeats = rates.log() + (equal / earlier).log() - logprob  # -inf if no earlier completion is equal
    rows = torch.logaddexp((1 - rates).log(), repeats)
    groups = rows.new_zeros(len(rates), int(group.max()) + 1).index_add(1, group, rows)
    shares = torch.tensor(COPY_SHARES, dtype=torch.float64).reshape(-1, 1, 1)
    return torch.logaddexp((1 - shares).log(), shares.log() + groups).sum(dim=2).flatten()


def log_false_alarm(evidence: Tensor) -> float:
    """Return the logarithm of an upper bound on the probability that independent draws give at least this evidence.

    The bound is for the mixture of all alternatives with equal weights. For evidence from ``accumulated``, the bound is
    on the probability per rollout.

    Args:
        evidence: [K] in nats.
    """
    return min(0.0, math.log(len(evidence)) - evidence.logsumexp(dim=0).item())


class Jump(NamedTuple):
    """Comparison of a value with earlier values."""

    ratio: float
    """Current value divided by the median of the earlier values; 1 if there are too few earlier values."""
    sigmas: float
    """Difference of the current value's logarithm from the median of the earlier logarithms, in robust standard
    deviations (from the median absolute deviation); 0 if there are too few earlier values."""


def jump(value: float, history: Sequence[float], *, floor: float, least: int = 2) -> Jump:
    """Compare a positive value with earlier values, by median and median absolute deviation of their logarithms.

    Args:
        value: the current value.
        history: the earlier values.
        floor: values below this are raised to it before the comparison.
        least: number of earlier values below which there is no comparison.
    """
    if len(history) < least:
        return Jump(1.0, 0.0)
    logs = torch.tensor([value, *history], dtype=torch.float64).clamp(min=floor).log()
    median = logs[1:].quantile(0.5)
    spread = 1.4826 * (logs[1:] - median).abs().quantile(0.5)
    distance = logs[0] - median
    return Jump(distance.exp().item(), (distance / spread.clamp(min=0.1)).item())  # 10 %: few values estimate it badly
