"""MXFP4 (OCP microscaling v1.0): four-bit E2M1 weights in blocks of 32 columns, a power of two (E8M0) a block.

    w = e2m1(code) * 2^(block_scale - 127)

Codes and scales equal those of compressed-tensors 0.17 (``MXFP4A16``) bit for bit in fp32 arithmetic.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from qerl_pl.quant.formats import Format, PackedWeight, decode
from qerl_pl.quant.nvfp4 import E2M1_CODES, e2m1_codes

BLOCK = 32


def no_tensor_scale(amax: Tensor) -> Tensor:
    """[] fp64 one, on the device of amax."""
    return torch.ones((), dtype=torch.float64, device=amax.device)


def round_block_scale(block_amax: Tensor, _global_scale: Tensor) -> Tensor:
    """[...] uint8 exponents, biased by 127, that put a block's largest magnitude ([...] fp32) into [3.5, 7).

    E2M1's largest value, 6, has exponent 2. A magnitude of 1.75 or more times a power of two would be clipped hard
    under that power, so it rounds up to the next.
    """
    exponent = (block_amax.view(torch.int32) + (1 << 21)) >> 23  # biased, of the magnitude rounded up from 1.75
    return (exponent - 2).clamp_min(0).to(torch.uint8)


def effective_scale(block_scale: Tensor, _global_scale: Tensor) -> Tensor:
    """fp32 powers of two. Shape of block_scale."""
    bits = block_scale.int()
    return torch.where(bits == 0, 1 << 22, bits << 23).view(torch.float32)  # 2^-127 is a denormal


def nearby_block_scales(block_scale: Tensor) -> Iterator[Tensor]:
    """The given powers of two, half and twice of them."""
    for step in (0, -1, 1):
        yield (block_scale.int() + step).clamp(0, 254).to(torch.uint8)


def dequantize(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """[N, K] in ``dtype``; exact in bf16."""
    return decode(weight.codes, effective_scale(weight.block_scale, weight.global_scale), E2M1_CODES, dtype)


MXFP4 = Format(
    name="mxfp4",
    block=BLOCK,
    values=E2M1_CODES,
    scale_dtype=torch.uint8,
    encode=e2m1_codes,
    tensor_scale=no_tensor_scale,
    round_scale=round_block_scale,
    effective_scale=effective_scale,
    nearby_scales=nearby_block_scales,
    dequantize=dequantize,
)
