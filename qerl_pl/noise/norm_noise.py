"""Gaussian noise on norm weights: a pure function of the clean weights, sigma and a seed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

BLOCK_NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")


def is_block_norm(name: str) -> bool:
    """True for the two norms of a transformer block; False for the final norm and for query/key norms."""
    return name.endswith(BLOCK_NORMS)


def noisy_norms(clean: Mapping[str, Tensor], sigma: float, seed: int) -> dict[str, Tensor]:
    """w + Z with Z ~ N(0, sigma^2) for every weight (arXiv 2510.11696, eq. 7-10).

    The noise is drawn in fp32 on the CPU from one stream over the sorted names, so it is the same on every device and
    rank. Sigma 0 returns copies that are equal bit for bit.

    Args:
        clean: names to weights, [H] of any floating dtype on any device.
        sigma: standard deviation in units of the weight.
        seed: in [0, 2^63); equal seeds give equal noise.

    Returns:
        The same names to new tensors of the same dtype and device; ``clean`` is left alone.

    Raises:
        ValueError: sigma is negative.
    """
    if sigma < 0:
        raise ValueError(f"sigma is {sigma}; expected 0 (no noise) or more")
    if sigma == 0 or not clean:
        return {name: weight.clone() for name, weight in clean.items()}
    names = sorted(clean)
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(sum(clean[name].numel() for name in names), generator=generator) * sigma
    chunks = noise.to(clean[names[0]].device).split([clean[name].numel() for name in names])
    return {
        name: (clean[name].float() + chunk.view_as(clean[name])).to(clean[name].dtype)
        for name, chunk in zip(names, chunks, strict=True)
    }
