"""How well each linear survived quantisation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qerl_pl.quant.formats import Format, PackedWeight


@dataclass(frozen=True)
class LayerReport:
    """How well one linear survived."""

    name: str
    shape: tuple[int, int]
    weight_error: float
    """Frobenius norm of the error over that of the weight."""
    max_error: float
    """Largest error of a weight over the largest weight."""
    outlier_ratio: float
    """Largest weight over the root mean square: how far the tensor scale has to reach."""


def report_layer(name: str, weight: Tensor, packed: PackedWeight, fmt: Format) -> LayerReport:
    """Compare a weight [N, K] with its packed form."""
    weight = weight.float()
    error = fmt.dequantize(packed, torch.float32).sub_(weight)
    norm, largest = weight.norm().item(), weight.abs().max().item()
    rms = norm / weight.numel() ** 0.5
    return LayerReport(
        name=name,
        shape=(weight.shape[0], weight.shape[1]),
        weight_error=error.norm().item() / norm if norm else 0.0,
        max_error=error.abs().max().item() / largest if largest else 0.0,
        outlier_ratio=largest / rms if rms else 0.0,
    )
