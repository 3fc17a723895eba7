"""Implementations of other libraries for the same weights: compressed-tensors, bitsandbytes' NF4, PEFT's formula."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qerl_pl.quant.formats import PackedWeight
from qerl_pl.quant.nvfp4 import scale_divisor


class Lora(nn.Module):
    """PEFT's formula around any linear, the adapter in the compute dtype, which is the fastest that PEFT has."""

    def __init__(self, base: nn.Module, rows: int, cols: int, rank: int, *, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(rank, cols, dtype=dtype, device=device) / cols**0.5)
        self.b = nn.Parameter(torch.randn(rows, rank, dtype=dtype, device=device) / 100)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.a), self.b) * 1.0


class DecompressingLinear(nn.Module):
    """Linear of the published QeRL code: compressed-tensors decompresses in every forward, and autograd keeps it."""

    def __init__(self, weight: PackedWeight) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, compressed_tensors_dequantize(self.weight))


def compressed_tensors_dequantize(weight: PackedWeight) -> Tensor:
    """Decompress to [N, K] bf16 by the library."""
    from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor

    tensors = {
        "weight_packed": weight.codes,
        "weight_scale": weight.block_scale.view(torch.float8_e4m3fn),
        "weight_global_scale": scale_divisor(weight.global_scale).view(1),
    }
    return NVFP4PackedCompressor.decompress(tensors, _scheme())["weight"]


@cache
def _scheme() -> Any:
    from compressed_tensors.quantization import preset_name_to_scheme

    return preset_name_to_scheme("NVFP4A16", ["Linear"])


def nf4_quantize(dense: Tensor) -> tuple[Tensor, Any]:
    """Quantise by bitsandbytes in blocks of 64, whose scales are not quantised again; returns weight and state."""
    from bitsandbytes.functional import quantize_4bit

    return quantize_4bit(dense, quant_type="nf4", blocksize=64, compress_statistics=False)


def nf4_dequantize(packed: Tensor, state: Any) -> Tensor:
    """Dequantise to [N, K] in the original dtype."""
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(packed, state)


def nf4_linear(dense: Tensor) -> nn.Module:
    """Make bitsandbytes' linear with a bf16 compute dtype."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    rows, cols = dense.shape
    linear = Linear4bit(cols, rows, bias=False, compute_dtype=torch.bfloat16, device="meta")
    weight: Any = Params4bit
    linear.weight = weight(dense, requires_grad=False, compress_statistics=False, quant_type="nf4")
    return linear.to(dense.device)
