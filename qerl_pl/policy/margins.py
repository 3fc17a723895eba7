"""Audit of sampled tokens by the noise that the sampler must have added.

vLLM's sampler on a GPU (its model runner V2) samples by the Gumbel-max trick: it takes the token with the largest sum
of logit and noise, and the noise is a hash of the request's seed, the position and the token. So the trainer can
compute from its own logits which token the sampler must have taken, up to the difference between the trainer's and the
sampler's logits (Token-DiFR, arXiv 2511.20621, which audits providers of models in this way).
"""

import torch
from torch import Tensor

WORD = 0xFFFFFFFF  # arithmetic is modulo 2^32, in int64


def margins(logits: Tensor, noise: Tensor, targets: Tensor) -> Tensor:
    """Compute how far each target is from being the token that must have been sampled: max(z + g) - (z + g)[target].

    A margin is at least 0. If the sampler took the token with the largest sum of its own logits and the noise, the
    margin is at most the largest difference between two tokens' logit errors (sampler minus trainer). A token that was
    sampled with another temperature, row of logits or noise usually has a margin of some nats.

    Args:
        logits: [R, V] fp32, z, divided by the sampling temperature.
        noise: [R, V] fp32, g, as ``keyed_noise`` returns it.
        targets: [R] int64 in [0, V).

    Returns:
        [R] fp32 in nats.
    """
    sums = logits + noise
    return sums.amax(1) - sums.gather(1, targets[:, None])[:, 0]


def keyed_noise(seeds: Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """Compute the Gumbel noise that vLLM 0.32 adds to R rows of logits: [R, V] fp32.

    It is -log(-log(1 - u)) for u = (h + 1/2) / 2^32, where h is murmur3's 32-bit hash of four words: the halves of the
    seed, the position and the token.

    Args:
        seeds: [R] int64, the seed of each row's request.
        positions: [R] int64, the position in its sequence, from 0, of the last token before the sampled one.
        vocabulary: number of tokens, V.
    """
    seeds, positions = seeds[:, None], positions[:, None]
    state = torch.zeros_like(seeds)
    for word in (seeds & WORD, (seeds >> 32) & WORD, positions & WORD, torch.arange(vocabulary, device=seeds.device)):
        key = _rotated(word * 0xCC9E2D51 & WORD, 15) * 0x1B873593 & WORD
        state = _rotated(state ^ key, 13) * 5 + 0xE6546B64 & WORD
    state ^= 16  # bytes that were hashed
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = (state ^ (state >> shift)) * factor & WORD
    state ^= state >> 16
    uniform = (state >> 16).float() * 2.0**-16 + ((state & 0xFFFF).float() + 0.5) * 2.0**-32
    return -(-torch.log1p(-uniform.clamp(max=1 - 2**-24))).log()


def _rotated(words: Tensor, bits: int) -> Tensor:
    return (words << bits | words >> (32 - bits)) & WORD
