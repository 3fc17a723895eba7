"""Tests of whether completions are independent draws from the distribution whose log-probabilities the engine reports.

Both tests are likelihood ratios. Whatever the engine's distribution p is, a ratio A(x) / p(x) of another distribution A
to it has mean 1 under draws x from p, so the product over tokens is a non-negative martingale of mean 1, and so is a
mixture of such products. By Ville's inequality it ever exceeds 1 / a with probability a at most: no assumption about
p, about the length of completions, or about how far the trainer's distribution q is from p. The logarithms of such
ratios are called evidence here, in nats.
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
OUTSIDE = 0.05  # weight of q itself in a nucleus alternative, so that one token outside of the nucleus does not end it
COPY_RATES = (0.9, 0.5, 0.1, 0.01, 1e-3)
COPY_SHARES = (1.0, 1 / 16)


def alternative_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """Log-probabilities of tokens under q = softmax(logits) and under K other ways of sampling from the same logits.

    These are ``ALTERNATIVES``: q^b / Z for each b of ``POWERS``, which is another temperature, and for each m of
    ``NUCLEI`` mostly the smallest set of likely tokens that holds the mass m (top_p).

    Args:
        logits: [R, V] fp32 or fp64, already divided by the sampling temperature.
        targets: [R] int64 in [0, V).

    Returns:
        [R, 1 + K] nats, of the logits' dtype; column 0 is log q.
    """
    log_q = logits.log_softmax(dim=1)
    q, own = log_q.exp(), log_q.gather(1, targets.unsqueeze(1))  # [R, V], [R, 1]

    def total(values: Tensor) -> Tensor:
        return values.sum(dim=1, keepdim=True)

    root, square = q.sqrt(), q.square()
    fourth_root = root.sqrt()  # products of roots are several times as fast as powers
    below_one = [total(root), total(root * fourth_root)]
    above_one = [total(q * fourth_root), total(q * root), total(square), total(square.square())]
    masses = zip(POWERS, below_one + above_one, strict=True)
    columns = [own, *(power * own - mass.log() for power, mass in masses)]
    # Tokens in descending order of q share the interval [0, 1] out, and equal ones evenly: [likelier, at_least].
    likelier, at_least = (total(q.where(mask, 0)) for mask in (log_q > own, log_q >= own))
    width = (at_least - likelier).clamp(min=torch.finfo(q.dtype).tiny)
    for mass in NUCLEI:
        inside = ((mass - likelier) / width).clamp(0, 1) / mass
        columns.append(own + (OUTSIDE + (1 - OUTSIDE) * inside).log())
    return torch.cat(columns, dim=1)


def accumulated(before: Tensor, evidence: Tensor) -> Tensor:
    """Evidence that draws turned into those of an alternative at some rollout up to this one.

    The Shiryaev-Roberts sum over the rollouts at which this may have begun, M_n = (1 + M_{n-1}) exp(evidence_n) (an
    e-detector, arXiv 2203.03532). M_n - n is a martingale under draws, so M exceeds c within the first n
    rollouts with probability n / c at most.

    Args:
        before: [K] log M_{n-1}; -inf before the first rollout.
        evidence: [K] sums of log A - log p over the tokens of this rollout, nats.
    """
    return torch.logaddexp(torch.zeros_like(before), before) + evidence


def copy_evidence(draws: Iterable[tuple[int, int, int, float]]) -> Tensor:
    """How much better copies explain completions than independent draws do.

    The alternatives: in a share s of the prompts (``COPY_SHARES``) a completion repeats one of those before it with
    probability r (``COPY_RATES``) and is a draw otherwise. A completion has E_p[1{it equals an earlier one} / p(it)] =
    1, so these are martingales too. Completions that repeat because they are nearly certain are no evidence.

    Args:
        draws: one tuple for each completion: an int that stands for its prompt, earlier completions of that prompt, how
            many of those are equal to this one, its log-probability in nats.

    Returns:
        [len(COPY_SHARES) * len(COPY_RATES)] fp64 nats.
    """
    seen = [draw for draw in draws if draw[1]]
    if not seen:
        return torch.zeros(len(COPY_SHARES) * len(COPY_RATES), dtype=torch.float64)
    _, group = torch.tensor([draw[0] for draw in seen]).unique(return_inverse=True)
    earlier, equal, logprob = torch.tensor([draw[1:] for draw in seen], dtype=torch.float64).unbind(dim=1)
    rates = torch.tensor(COPY_RATES, dtype=torch.float64).unsqueeze(1)
    repeats = rates.log() + (equal / earlier).log() - logprob  # -inf where none is equal
    rows = torch.logaddexp((1 - rates).log(), repeats)
    groups = rows.new_zeros(len(rates), int(group.max()) + 1).index_add(1, group, rows)
    shares = torch.tensor(COPY_SHARES, dtype=torch.float64).reshape(-1, 1, 1)
    return torch.logaddexp((1 - shares).log(), shares.log() + groups).sum(dim=2).flatten()


def log_false_alarm(evidence: Tensor) -> float:
    """Log of a bound on the probability of so much evidence under draws, the alternatives being weighted alike.

    For ``accumulated`` evidence: of the probability for each rollout of the run.
    """
    return min(0.0, math.log(len(evidence)) - evidence.logsumexp(dim=0).item())


class Jump(NamedTuple):
    """A value against those before it."""

    ratio: float
    """To their median; 1 where there are too few."""
    sigmas: float
    """The logarithm's distance to their median, in robust standard deviations; 0 where there are too few."""


def jump(value: float, history: Sequence[float], *, floor: float, least: int = 2) -> Jump:
    """How far a positive value is from its history: median and median absolute deviation of the logarithms.

    Args:
        value: now.
        history: before.
        floor: smaller values count as this.
        least: values that a history must have.
    """
    if len(history) < least:
        return Jump(1.0, 0.0)
    logs = torch.tensor([value, *history], dtype=torch.float64).clamp(min=floor).log()
    median = logs[1:].quantile(0.5)
    spread = 1.4826 * (logs[1:] - median).abs().quantile(0.5)
    distance = logs[0] - median
    return Jump(distance.exp().item(), (distance / spread.clamp(min=0.1)).item())  # 10 %: few values say little
