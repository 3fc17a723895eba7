"""A random layer as they are in language models: correlated inputs, a few channels far larger than the others."""

from __future__ import annotations

import torch
from torch import Tensor


def layer_with_outliers(rows: int, cols: int, num_inputs: int = 1024) -> tuple[Tensor, Tensor]:
    """A weight [N, K], and the mean of x x^T [K, K] over correlated inputs; one channel in 64 is 20 times larger."""
    generator = torch.Generator().manual_seed(rows)
    weight = 0.02 * torch.randn(rows, cols, generator=generator)
    mixing = torch.randn(cols // 4, cols, generator=generator) / (cols // 4) ** 0.5
    inputs = torch.randn(num_inputs, cols // 4, generator=generator) @ mixing
    inputs += 0.5 * torch.randn(num_inputs, cols, generator=generator)
    scale = torch.exp(0.6 * torch.randn(cols, generator=generator))
    scale[torch.randperm(cols, generator=generator)[: cols // 64]] *= 20
    inputs *= scale
    return weight, inputs.T @ inputs / num_inputs
