"""Sequential test of whether an engine sampled some of the completions with another policy than the current one, such
as the base without the adapter. It works even if the other policy changes log-probabilities less than rounding errors
do.

For each sampled token, the error r is the engine's log-probability minus the trainer's, and the effect d is how much
the other policy would change the log-probability. If the engine used the other policy, r is d plus rounding errors. If
the engine is correct, r is rounding errors alone, which are as likely positive as negative whatever d is. The
likelihood ratio of the first case to the second has mean 1 for a correct engine, for rounding errors of any size and
any symmetric distribution, so products of such ratios over tokens are seldom large for a correct engine
(``policy.evidence``).

The test is valid only if the rounding errors of the trainer's log-probability, which are in r, are not also in d. So d
is computed from two other forward passes: one with the policy moved towards the other policy, and one with it moved as
far in the opposite direction. Both are moved by a multiple of the distance between the policies (the strength), and d
is the difference of the two log-probabilities divided by twice the strength. Rounding errors that both passes share
with a pass of the current policy cancel in this difference. The strength makes the change larger than the rounding
errors of the two passes.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import softplus

from qerl_pl.policy.jumps import LEAST_OTHERS

TOLERATED = 0.3
"""Fraction of another policy's effect on log-probabilities that the errors of a correct engine (its log-probabilities
minus the trainer's) may contain without counting as evidence that the engine sampled with that policy.

A correct engine computes a slightly smaller effect of the adapter than the trainer does: with pretrained models in bf16
by up to a tenth after the first updates, and by about a hundredth later. One of the other policies is the one before
the last update. If this update was small compared with all updates before it, a hundredth of the whole adapter's effect
is a large fraction of the last update's effect (``docs/correctness.md``).
"""
MOST_CERTAIN = 0.95
"""Tokens of a larger probability are left out, because the scale of their rounding errors cannot be estimated well."""
RESOLUTION = 1e-6
"""Number in nats that is added to the scale of each token's rounding errors: sums of fp32 logits have errors of this
size, even at tokens of which the policy is certain."""
STRONGEST = 32.0
"""Largest strength, the multiple of the distance to another policy by which the current policy is moved."""
LARGER = 16.0
"""Ratio that ``next_strength`` aims at: the difference of logits between the policy moved towards another policy and
the one moved away from it, divided by that between engine and trainer. At this ratio, rounding errors hardly matter."""
LINEAR = 0.5
"""Largest mean difference of logits between the policy moved towards another policy and the one moved away from it. Up
to it, the difference counts as proportional to the distance of the move."""


def moved(current: Mapping[str, Tensor], other: Mapping[str, Tensor], *, by: float) -> dict[str, Tensor]:
    """Return current + by * (other - current) for each tensor of an adapter, in fp32 on the device of ``current``."""
    return {
        name: tensor.float().lerp(other[name].to(device=tensor.device, dtype=torch.float32), by)
        for name, tensor in current.items()
    }


def effect(towards: Tensor, away: Tensor, *, strength: float) -> Tensor:
    """Estimate how much another policy would change the log-probabilities of N tokens: [N] in nats. ``towards`` and
    ``away`` [N] are the tokens' log-probabilities, in nats, after the current policy was moved towards the other
    policy, or as far in the opposite direction. Both moves are ``strength`` times the distance between the two
    policies."""
    return (towards - away) / (2 * strength)


def rounding_scale(trainer: Tensor, sampler: Tensor) -> Tensor:
    """Estimate how large the differences between the trainer's and the sampler's log-probabilities of N tokens are
    because of rounding errors. The arguments are the log-probabilities, [N] each in nats. Returns for each token the
    scale s of a logistic distribution of its difference, [N] in nats.

    A token's difference is assumed to be proportional to 1 - p, where p is its probability (``jumps.logit_gap`` says
    why), with one factor for all tokens. The estimate does not depend on the signs of the differences.
    """
    others = (-trainer.expm1()).clamp(min=LEAST_OTHERS)
    mean = torch.minimum((sampler - trainer).abs(), others).sum() / others.sum().clamp(min=LEAST_OTHERS)
    return mean / (2 * math.log(2)) * others + RESOLUTION  # the mean of |x| is 2 s log 2


def token_evidence(error: Tensor, effect: Tensor, scale: Tensor) -> Tensor:
    """Compute, for each token, the log-likelihood ratio of the hypothesis that it was sampled with another policy to
    the hypothesis that it was sampled with the current one, [N] in nats.

    Let r be the error, d the effect, f the density of the logistic distribution of the given scale, and m =
    ``TOLERATED`` d. The result is log(2 f(r - d) / (f(r - d) + f(r - m + d - m))), where the second density is the
    first, reflected about m. The mean of the likelihood ratio, without the logarithm, is therefore 1 if r is
    distributed symmetrically about m. It is at most 1 if r is symmetric about a value between -infinity and m in the
    direction of d, because the likelihood ratio increases with r in this direction (f is log-concave). It is never
    above 2.

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
    """Estimate by weighted least squares the factor x for which the errors of N tokens are x times the effect of
    another policy, plus rounding errors. It is about 0 if the engine is correct, 1 if it sampled all tokens with the
    other policy, and 0 if the other policy has no effect. The arguments are those of ``token_evidence``."""
    weight = effect / scale.square()
    return (error * weight).sum().item() / max((effect * weight).sum().item(), 1e-12)


def next_strength(strength: float, change: float, gap: float) -> float:
    """Choose the strength with which the next rollout is tested for completions that were sampled with another policy,
    such as the base without the adapter. For the test, the current policy is moved towards the other one and away from
    it, by ``strength`` times their distance.

    ``change`` is the mean difference of logits (``jumps.logit_gap``) between the two moved policies at the current
    ``strength``, and ``gap`` that between engine and trainer. The change has to be much larger than the gap, whose
    rounding errors would hide it, but small enough to be proportional to the strength. So the result, from 1 to
    ``STRONGEST``, is the strength at which the change would be the smaller of ``LARGER`` times the gap and ``LINEAR``.
    """
    return min(max(1.0, strength * min(LARGER * gap, LINEAR) / max(change, 1e-12)), STRONGEST)


def is_first(rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[bool]]:
    """Mark the completion tokens of several rows that count in the test of another policy. A token counts if no earlier
    row has the same token after the same preceding tokens, those of the prompt included: the rounding errors of the two
    would be equal, and may count only once.

    Args:
        rows: tokens of prompt and completion of each row.

    Returns:
        A list for each row, with a bool for each token of its completion: True if the token counts.
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
