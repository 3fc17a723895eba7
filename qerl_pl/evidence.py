"""Evidence that completions are what their reported log-probabilities say: independent draws from those distributions.

Notation: p the distribution that an engine reports to have sampled from, q the trainer's for the same policy, s(x) =
-log q(x), H its mean under q (the entropy), V its variance under q (the varentropy), w = q / p.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

MAX_WEIGHT = 20.0  # of w; beyond it the gap between trainer and sampler is the finding
COPY_RATES = (0.5, 0.1, 0.01, 1e-3)


class Surprise(NamedTuple):
    """Sums over sampled tokens that say whether these are draws; ``+`` joins those of several ranks."""

    excess: float
    """Sum of w (s - H), nats; 0 in the mean for draws from p."""
    expected_square: float
    """Sum of w V, nats squared."""
    square: float
    """Sum of w^2 (s - H)^2, nats squared."""
    highest: float
    """The largest w (s - H), nats."""
    lowest: float
    """The largest -w (s - H), nats; no more than w H."""
    num_tokens: int

    def joined(self, other: Surprise) -> Surprise:
        """Both together."""
        return Surprise(
            self.excess + other.excess,
            self.expected_square + other.expected_square,
            self.square + other.square,
            max(self.highest, other.highest),
            max(self.lowest, other.lowest),
            self.num_tokens + other.num_tokens,
        )

    @property
    def sigmas(self) -> float:
        """The excess over its standard deviation: above 0 too surprising (hotter), below 0 too likely (colder)."""
        return self.excess / math.sqrt(max(self.expected_square, self.square, 1e-12))

    @property
    def log_p(self) -> float:
        """Log of a bound on the probability that draws from p have an excess of this size, either sign.

        Freedman's inequality for martingales (Ann. Probab. 3, 1975, theorem 1.6), P(S >= x) <= exp(-x^2 / (2 (V + b x /
        3))), with the larger of expected and observed variance for V, and for its bound b the largest step seen in
        that direction.
        """
        size = abs(self.excess)
        bound = self.highest if self.excess > 0 else self.lowest
        variance = max(self.expected_square, self.square) + bound * size / 3
        return min(0.0, math.log(2) - size**2 / (2 * max(variance, 1e-12)))


def surprise(logprobs: Tensor, entropy: Tensor, varentropy: Tensor, sampler_logprobs: Tensor) -> Surprise:
    """Whether tokens are draws from what the sampler reports, with the trainer's distribution as the measure.

    Under draws from p the sum of w (s - H) is a martingale, because E_p[w (s - H)] = E_q[s - H] = 0, however p and q
    differ: by other kernels, by rounding. Ends of completions are stopping times, which change nothing. What does not
    follow from p does: tokens drawn at another temperature, greedily, from a nucleus, and scored afterwards.

    Rows have to be chosen without a look at what was sampled in them. To go on with them, in an order of chance, until
    so many tokens are there is allowed: that is a stopping time too.

    Args:
        logprobs: [N] nats, log q of the sampled tokens.
        entropy: [N] nats, of q.
        varentropy: [N] nats squared, of q.
        sampler_logprobs: [N] nats, log p of the sampled tokens as reported.
    """
    if not logprobs.shape == entropy.shape == varentropy.shape == sampler_logprobs.shape:
        raise ValueError("log-probabilities, entropies and varentropies differ in shape; expected [N] for each")
    if logprobs.numel() == 0:
        return Surprise(0.0, 0.0, 0.0, 0.0, 0.0, 0)
    log_q, entropy, varentropy, log_p = (x.double() for x in (logprobs, entropy, varentropy, sampler_logprobs))
    weight = (log_q - log_p).clamp(max=math.log(MAX_WEIGHT)).exp()
    steps = weight * (-log_q - entropy)
    sums = torch.stack([steps.sum(), (weight * varentropy).sum(), steps.square().sum()])
    highest, lowest = steps.max().clamp(min=0), (weight * entropy).max()
    excess, expected_square, square = sums.tolist()
    return Surprise(excess, expected_square, square, highest.item(), lowest.item(), logprobs.numel())


def copy_evidence(draws: Iterable[tuple[int, int, float]]) -> Tensor:
    """How much better copies explain completions than independent draws do.

    For each rate r of ``COPY_RATES`` the likelihood ratio of "with probability r a completion repeats one of those
    before it, else it is a draw" to "all are draws". A completion has E_p[1{it equals an earlier one} / p(it)] = 1, so
    each is a martingale of mean 1 under draws. By Ville's inequality their mean exceeds 1 / a with probability a at the
    most, for any number of completions and any distributions. Completions that repeat because they are nearly certain
    are no evidence.

    Args:
        draws: (earlier completions of the same prompt, how many of those are equal to this, its log-probability in
            nats) of each completion.

    Returns:
        [len(COPY_RATES)] fp64, log likelihood ratios.
    """
    seen = [draw for draw in draws if draw[0]]
    if not seen:
        return torch.zeros(len(COPY_RATES), dtype=torch.float64)
    earlier, equal, logprob = torch.tensor(seen, dtype=torch.float64).unbind(dim=1)
    rates = torch.tensor(COPY_RATES, dtype=torch.float64).unsqueeze(1)
    repeats = rates.log() + (equal / earlier).log() - logprob  # -inf where none is equal
    return torch.logaddexp((1 - rates).log(), repeats).sum(dim=1)


def copy_log_p(evidence: Tensor) -> float:
    """Log of a bound on the probability that draws give that much ``copy_evidence``."""
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
