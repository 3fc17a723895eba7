"""Add Gaussian noise to norm weights: a pure function of the weights without noise, sigma and a seed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class NormNoise:
    """Gaussian noise that is added to the norm weights for one rollout."""

    sigma: float = 0.0
    """Standard deviation of the noise, absolute and not relative to the weight; 0 means no noise."""
    seed: int = 0
    """Seed in [0, 2^63)."""
    rounded: bool = False
    """Whether noisy weights are rounded to the engine's compute dtype instead of staying in fp32. Rounding to bf16
    removes a part of the noise if sigma is below about 2e-3."""

    def __post_init__(self) -> None:
        if not 0 <= self.sigma < math.inf:
            raise ValueError(f"sigma is {self.sigma}; expected 0 (no noise) or more")

    def kept_in(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which an engine that computes in ``dtype`` stores the norm weights with this noise."""
        return dtype if self.rounded and self.sigma else torch.promote_types(dtype, torch.float32)


def is_noise_norm(name: str, norms: Sequence[str]) -> bool:
    """Return whether the parameter ``name`` is the weight of a norm that gets noise, one of those that ``norms`` names
    in each decoder block (``Family.noise_norms``)."""
    module, _, leaf = name.rpartition(".")
    return leaf == "weight" and module.rpartition(".")[2] in norms


def noisy_norms(
    clean: Mapping[str, Tensor], noise: NormNoise, *, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Compute w + Z with Z ~ N(0, sigma^2) for every weight w [H] of hidden size H (arXiv 2510.11696, eq. 7-10).
    Returns new tensors by name, also if sigma is 0, on the device of each weight, in ``dtype`` (None: in the dtype of
    each weight). The noise is drawn in fp32 on the CPU, by one generator for all norms in the order of their names, so
    it is equal on every device and rank."""
    if noise.sigma == 0:
        return {name: weight.to(dtype or weight.dtype, copy=True) for name, weight in clean.items()}
    generator = torch.Generator().manual_seed(noise.seed)
    noisy = {}
    for name, weight in sorted(clean.items()):
        added = torch.randn(weight.shape, dtype=torch.float32, generator=generator) * noise.sigma
        # weight + noise is computed in fp32 (fp64 if the weight is fp64)
        noisy[name] = (weight + added.to(weight.device)).to(dtype or weight.dtype)
    return noisy


def realized_sigma(clean: Mapping[str, Tensor], noise: NormNoise, *, dtype: torch.dtype) -> float:
    """Compute the root mean square of the noise that remains in norm weights after rounding to ``dtype``: in bf16, this
    is less than sigma if sigma is below about a quarter of the spacing of bf16 numbers near the weights.
    """
    noisy = noisy_norms(clean, noise, dtype=dtype)
    changes = [noisy[name].float() - weight.to(dtype).float() for name, weight in clean.items()]
    return torch.cat([change.flatten() for change in changes]).square().mean().sqrt().item()
