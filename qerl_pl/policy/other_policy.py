"""Sequential test of whether an engine sampled some of the completions with another policy than the current one, even
if the other policy changes the log-probability of a token less than rounding errors do.

For each sampled token, the error r is the engine's log-probability minus the trainer's, and the effect d is how much
the other policy, such as the one without the adapter, would change the log-probability. If the engine used the other
policy, r is d plus rounding errors. If the engine is correct, r is rounding errors alone, which are as likely positive
as negative whatever d is. The likelihood ratio of the first case to the second has mean 1 for a correct engine, for
rounding errors of any size and any symmetric distribution, so products of such ratios over tokens are seldom large for
a correct engine (``policy.evidence``).

The test is valid only if the rounding errors of the trainer's log-probability, which are in r, are not also in d. So d
is the central difference of two passes that do not use the current policy itself: one with the policy moved towards the
other policy, and one with it moved as far in the opposite direction. What both passes have in common with a pass of the
current policy cancels. Both are moved by a multiple of the distance between the policies (the strength), so that the
change is larger than the rounding errors of these two passes.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import softplus

from qerl_pl.policy.jumps import LEAST_OTHERS

TOLERATED = 0.3
"""Fraction of the other policy's effect d that a correct engine's errors may contain.

A correct engine computes a slightly smaller effect of the adapter than the trainer does: with pretrained models in bf16
by up to a tenth after the first updates, and by about a hundredth later. If the last update was small compared with all
updates before it, a hundredth of the whole adapter is a large part of the last update's effect
(``docs/correctness.md``).
"""
MOST_CERTAIN = 0.95
"""Largest probability of the tokens that the test uses. The scale of the rounding errors of likelier tokens is too
small to be estimated well."""
RESOLUTION = 1e-6
"""Lower bound for the scale of a token's rounding errors in nats. Sums of fp32 logits have errors of this size, even at
tokens of which the policy is certain."""
STRONGEST = 32.0
"""Largest strength of a test: the multiple of the distance to the other policy by which the current policy is moved."""
LARGER = 16.0
"""Desired ratio of two differences of logits: between the two policies that were moved in opposite directions, and
between engine and trainer. At this ratio, rounding errors hardly change the estimated effect of the other policy."""
LINEAR = 0.5
"""Largest mean difference of logits between the two moved policies for which the effect counts as proportional to the
strength."""


def moved(current: Mapping[str, Tensor], other: Mapping[str, Tensor], *, by: float) -> dict[str, Tensor]:
    """Return current + by * (other - current) for each tensor of an adapter, in fp32 on the device of ``current``."""
    return {
        name: tensor.float().lerp(other[name].to(device=tensor.device, dtype=torch.float32), by)
        for name, tensor in current.items()
    }


def effect(towards: Tensor, away: Tensor, *, strength: float) -> Tensor:
    """Estimate how much another policy would change the log-probabilities of N tokens: [N] in nats. ``towards`` and
    ``away`` [N] are the log-probabilities, in nats, by the current policy moved towards the other policy, and in the
    opposite direction, by ``strength`` times the distance between the two."""
    return (towards - away) / (2 * strength)


def rounding_scale(trainer: Tensor, sampler: Tensor) -> Tensor:
    """Estimate the scale of the difference that rounding errors cause between the trainer's and the sampler's
    log-probability of each of N tokens, [N] each in nats. Returns the scale s of a logistic distribution for each
    token, [N] in nats.

    Errors of logits change a log-probability by 1 - p times as much (``jumps.logit_gap``), where p is the token's
    probability, and are assumed to have one scale for all tokens. The estimate does not depend on the signs of the
    differences.
    """
    others = (-trainer.expm1()).clamp(min=LEAST_OTHERS)
    mean = torch.minimum((sampler - trainer).abs(), others).sum() / others.sum().clamp(min=LEAST_OTHERS)
    return mean / (2 * math.log(2)) * others + RESOLUTION  # the mean of |x| is 2 s log 2


def token_evidence(error: Tensor, effect: Tensor, scale: Tensor) -> Tensor:
    """Compute, for each token, the log-likelihood ratio of the hypothesis that it was sampled with the other policy to
    the hypothesis that it was sampled with the current one, [N] in nats.

    Let r be the error, d the effect, f the density of the logistic distribution of the given scale, and m =
    ``TOLERATED`` d. The result is log(2 f(r - d) / (f(r - d) + f(r - m + d - m))), where the second density is the
    first, reflected about m. The mean of the ratio is therefore 1 if r is distributed symmetrically about m. It is at
    most 1 if r is symmetric about a value between -infinity and m in the direction of d, because the ratio increases
    with r in this direction (f is log-concave). The ratio is at most 2.

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
    """Estimate by weighted least squares the factor x for which the errors of N tokens are x times the effect of the
    other policy, plus rounding errors: about 0 if the engine is correct, 1 if it sampled all tokens with the other
    policy. Arguments are as in ``token_evidence``. Returns 0 if the other policy has no effect."""
    weight = effect / scale.square()
    return (error * weight).sum().item() / max((effect * weight).sum().item(), 1e-12)


def next_strength(strength: float, change: float, gap: float) -> float:
    """Choose the strength of the next test, 1 to ``STRONGEST``: the one with which the policies that are moved towards
    the other policy and away from it differ by ``LARGER`` times as much as engine and trainer, but by at most
    ``LINEAR``, as mean differences of logits (``jumps.logit_gap``). ``change`` is the difference of the two moved
    policies with the current ``strength``, ``gap`` that of engine and trainer."""
    return min(max(1.0, strength * min(LARGER * gap, LINEAR) / max(change, 1e-12)), STRONGEST)


def is_first(rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[list[bool]]:
    """Find the completion tokens that no earlier row has after the same preceding tokens. Where rows have a common
    beginning, their rounding errors are equal, and may count only once in a test.

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
