"""Sequential test of whether an engine sampled a part of the rows with another policy than it should, even if the other
policy changes the log-probability of a token less than rounding errors do.

For each sampled token, the error r is the engine's log-probability minus the trainer's, and the effect d is how much
the log-probability would be changed by the other policy, such as the one without the adapter. If the engine used the
other policy, r is d plus rounding errors. If the engine is right, r is rounding errors alone, which are as likely
positive as negative whatever d is. The likelihood ratio of the first to the second has mean 1 for a right engine, for
rounding errors of any size and any symmetric distribution, so products of such ratios are evidence in the sense of
``policy.evidence``.

The test is valid only if the rounding errors of the trainer's log-probability, which are in r, are not also in d. The
effect is therefore the central difference of two passes, one with the policy moved towards the other policy and one
with it moved as far in the opposite direction. What both have in common with the pass of the current policy cancels.
Both are moved by a multiple of the distance between the policies (the strength), so that d is larger than the rounding
errors of these two passes.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import softplus

from qerl_pl.policy.jumps import LEAST_OTHERS

TOLERATED = 0.3
"""Part of the other policy's effect that a right engine's errors may contain. A right engine computes a slightly
smaller effect of the adapter than the trainer does: with pretrained models in bf16 by up to a tenth after the first
updates, and by about a hundredth later. If the last update was small compared with all updates before it, a hundredth
of the whole adapter is a large part of its effect (``docs/correctness.md``)."""
MOST_CERTAIN = 0.95
"""Tokens with a larger probability do not count: their scale of rounding errors is too small to be estimated well."""
RESOLUTION = 1e-6
"""Least scale of a token's rounding errors in nats: that of sums of fp32 logits, which do not vanish where a token is
certain."""
STRONGEST = 32.0
"""Largest multiple of the distance between the policies by which the trainer's policy is moved."""
LARGER = 16.0
"""Change between the two moved policies as a multiple of the error, above which rounding hardly blurs the effect."""
LINEAR = 0.5
"""Mean change of logits between the two moved policies above which the effect is no longer proportional to the
strength."""


def moved(current: Mapping[str, Tensor], other: Mapping[str, Tensor], *, by: float) -> dict[str, Tensor]:
    """Return current + by * (other - current) for each tensor, in fp32 on the device of ``current``."""
    return {
        name: tensor.float().lerp(other[name].to(device=tensor.device, dtype=torch.float32), by)
        for name, tensor in current.items()
    }


def effect(towards: Tensor, away: Tensor, *, strength: float) -> Tensor:
    """Estimate how much another policy changes N log-probabilities, [N] in nats, from those of the policy moved by
    ``strength`` times the distance towards the other policy, and away from it."""
    return (towards - away) / (2 * strength)


def rounding_scale(trainer: Tensor, sampler: Tensor) -> Tensor:
    """Estimate the scale of the difference that rounding errors cause between two log-probabilities in nats of each of
    N tokens: the s of a logistic distribution, [N] in nats.

    Errors of logits change a log-probability by 1 - p times as much (``jumps.logit_gap``), and have one scale for all
    tokens. The estimate does not depend on the signs of the differences.
    """
    others = (-trainer.expm1()).clamp(min=LEAST_OTHERS)
    mean = torch.minimum((sampler - trainer).abs(), others).sum() / others.sum().clamp(min=LEAST_OTHERS)
    return mean / (2 * math.log(2)) * others + RESOLUTION  # the mean of |x| is 2 s log 2


def token_evidence(error: Tensor, effect: Tensor, scale: Tensor) -> Tensor:
    """Compute the evidence that each token was sampled with the other policy, [N] in nats.

    With m = ``TOLERATED`` d, the evidence is log(2 f(r - d) / (f(r - d) + f(r - m + d - m))), f being the density of
    the logistic distribution. The second density is the first, reflected about m. The mean of the ratio is therefore 1
    if r is distributed symmetrically about m, and at most 1 if r is symmetric about a value between -infinity and m in
    the direction of d, because the ratio increases with r in this direction (f is log-concave). It is at most 2.

    Args:
        error: [N] fp64, engine's minus trainer's log-probability in nats.
        effect: [N] fp64, change of the log-probability by the other policy in nats.
        scale: [N] fp64, scale of rounding errors in nats. A wrong scale makes the test weaker, never invalid.
    """

    def log_density(x: Tensor) -> Tensor:
        size = (x / scale).abs()
        return -size - 2 * (-size).exp().log1p()

    ratio = log_density(error - effect) - log_density(error + (1 - 2 * TOLERATED) * effect)
    return math.log(2) - softplus(-ratio)


def part(error: Tensor, effect: Tensor, scale: Tensor) -> float:
    """Estimate which part of another policy's effect the errors of N tokens contain, by weighted least squares: about
    0 if the engine is right, 1 if it sampled all tokens with the other policy. Arguments are as in ``token_evidence``;
    0 if the other policy has no effect."""
    weight = effect / scale.square()
    return (error * weight).sum().item() / max((effect * weight).sum().item(), 1e-12)


def next_strength(strength: float, change: float, gap: float) -> float:
    """Choose by how much to move the policy the next time, from 1 to ``STRONGEST`` times the distance to the other
    policy. ``change`` and ``gap`` are mean differences of logits (``jumps.logit_gap``) between the two policies that
    were moved by ``strength``, and between engine and trainer. The change should be ``LARGER`` times the gap, but not
    exceed ``LINEAR``."""
    return min(max(1.0, strength * min(LARGER * gap, LINEAR) / max(change, 1e-12)), STRONGEST)


def is_first(rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[bool]]:
    """Find the tokens that no earlier row has after the same tokens. Rows with a common beginning have the same
    rounding errors there, which may count only once.

    Args:
        rows: tokens of prompt and completion of each row.

    Returns:
        A list for each row, with a value for each token of its completion.
    """
    seen: set[tuple[int, int]] = set()
    found = []
    for prompt, completion in rows:
        before, firsts = hash(tuple(prompt)), []
        for token in completion:
            firsts.append((before, token) not in seen)
            seen.add((before, token))
            before = hash((before, token))
        found.append(firsts)
    return found
