"""Check that sampled tokens are those that vLLM's sampler must have chosen, given the pseudo-random noise that it must
have added to the logits.

vLLM's sampler on a GPU (its model runner V2) samples by the Gumbel-max trick: it takes the token with the largest sum
of logit and noise, and the noise is a hash of the request's seed, the position and the token. So the trainer can
compute from its own logits which token the sampler must have taken, up to the difference between the trainer's and the
sampler's logits (Token-DiFR, arXiv 2511.20621, which audits inference providers in this way).

The seed of a request is computed from the run's seed, the prompt's tokens and the completion's index in its group. So
the check finds three faults, even if the log-probabilities of the tokens are right: a completion belongs to another
prompt, it was selected among several, or a token was changed after sampling.
"""

import math

import torch
from torch import Tensor

from qerl_pl.policy.jumps import FAR, MAX_FAR_SHARE

WORD = 0xFFFFFFFF  # arithmetic is modulo 2^32, in int64


def margins(logits: Tensor, noise: Tensor, targets: Tensor) -> Tensor:
    """Compute how far each sampled token is from the token that the sampler must have taken, [R] fp32 in nats: max(z +
    g) - (z + g)[target], for the trainer's logits z [R, V], divided by the sampling temperature, and the sampler's
    noise g [R, V] (``keyed_noise``), fp32. ``targets`` [R] int64 are the sampled tokens.

    A margin is at least 0. If the sampler took the token with the largest sum of its own logits and the noise, it is at
    most the largest difference between two tokens' logit errors. If a token was sampled with another temperature, other
    noise or the logits of another position, it is usually some nats.
    """
    sums = logits + noise
    return sums.amax(1) - sums.gather(1, targets[:, None])[:, 0]


def chance_of_far(logprobs: Tensor) -> Tensor:
    """Compute the probability that the margin of a token exceeds log 8 (``FAR``) if the token was sampled with noise
    that is independent of the noise from which the margin is computed.

    The largest sum of logit and noise among the other tokens, minus this sum of the sampled token, has a logistic
    distribution around log((1 - p) / p), where p is the token's probability. So the result is (1 - p) / (1 - p + 8 p).
    ``logprobs`` are log p in nats, of any shape.
    """
    others = -logprobs.expm1()
    return others / (others + FAR * logprobs.exp())


def is_audited(logprobs: Tensor) -> Tensor:
    """Return whether each token has a probability of at most about 0.97, and so counts in ``draw_evidence``: almost any
    noise would select a likelier one. ``logprobs`` are in nats, of any shape."""
    return chance_of_far(logprobs) > MAX_FAR_SHARE


def draw_evidence(margins: Tensor, logprobs: Tensor) -> Tensor:
    """Compute, for each token, the log-likelihood ratio of the hypothesis that the token was sampled with noise
    independent of ``keyed_noise`` to the hypothesis that it was sampled correctly. The only observation that counts is
    whether the token's margin (``margins``) exceeds log 8 (``FAR``).

    For a correct engine, the probability of such a margin is assumed to be at most ``MAX_FAR_SHARE`` at every token,
    given the tokens before it. The likelihood ratio then has a mean of at most 1, so products of these ratios are
    seldom large for a correct engine (``policy.evidence``).

    Args:
        margins: [N] in nats; not read for tokens that ``is_audited`` excludes.
        logprobs: [N], the trainer's log-probabilities of the tokens in nats.

    Returns:
        [N] in nats, 0 for tokens that ``is_audited`` excludes.
    """
    chance = chance_of_far(logprobs)
    ratio = torch.where(margins > math.log(FAR), chance / MAX_FAR_SHARE, (1 - chance) / (1 - MAX_FAR_SHARE))
    return torch.where(is_audited(logprobs), ratio, 1.0).log()


def keyed_noise(of_rows: Tensor, of_tokens: Tensor) -> Tensor:
    """Compute the Gumbel noise that vLLM 0.32 adds to R rows of logits before it takes the largest: [R, V] fp32.

    The noise is -log(-log(1 - u)) for u = (h + 1/2) / 2^32, where h is murmur3's 32-bit hash of four 32-bit words: the
    two halves of the seed, the position and the token. Its parts that depend only on the row, ``of_rows`` [R]
    (``row_keys``), and only on the token, ``of_tokens`` [V] (``token_keys``), are arguments, so that a caller with many
    chunks of rows computes them once.
    """
    state = _mixed(of_rows[:, None], of_tokens)
    state ^= 16  # bytes that were hashed
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = (state ^ (state >> shift)) * factor & WORD
    state ^= state >> 16
    uniform = (state >> 16).float() * 2.0**-16 + ((state & 0xFFFF).float() + 0.5) * 2.0**-32
    return -(-torch.log1p(-uniform.clamp(max=1 - 2**-24))).log()


def row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """Compute the part of ``keyed_noise`` that does not depend on the token, [R] int64: the state of the hash after
    seed and position. ``seeds`` [R] int64 are the seeds of the rows' requests, and ``positions`` [R] int64 the
    positions in their sequences, from 0, of the last token before the sampled one."""
    state = torch.zeros_like(seeds)
    for word in (seeds & WORD, (seeds >> 32) & WORD, positions & WORD):
        state = _mixed(state, _key(word))
    return state


def token_keys(vocabulary: int, device: torch.device | None = None) -> Tensor:
    """Compute the part of ``keyed_noise`` that depends only on the token: what each of V tokens adds to the hash, [V]
    int64."""
    return _key(torch.arange(vocabulary, device=device))


def _key(words: Tensor) -> Tensor:
    return _rotated(words * 0xCC9E2D51 & WORD, 15) * 0x1B873593 & WORD


def _mixed(state: Tensor, key: Tensor) -> Tensor:
    return _rotated(state ^ key, 13) * 5 + 0xE6546B64 & WORD


def _rotated(words: Tensor, bits: int) -> Tensor:
    return (words << bits | words >> (32 - bits)) & WORD
