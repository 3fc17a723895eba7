"""Dequantisation by table look-up, the definition that tests compare faster functions with."""

import torch
from torch import Tensor

from qerl_pl.quant.formats import Format, PackedWeight
from qerl_pl.quant.nvfp4 import NVFP4


def unpack(packed: Tensor) -> Tensor:
    """Unpack bytes, [N, K/2], into codes, [N, K]."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(1)


def dequantize_reference(weight: PackedWeight, fmt: Format = NVFP4) -> Tensor:
    """Dequantise a weight to [N, K] fp32."""
    value = torch.tensor(fmt.values, device=weight.codes.device)[unpack(weight.codes).long()]
    return value * fmt.effective_scale(weight.block_scale, weight.global_scale).repeat_interleave(fmt.block, dim=1)
