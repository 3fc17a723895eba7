"""MXFP4 (OCP microscaling v1.0): 4-bit E2M1 weights in blocks of 32 columns, with a power of two (E8M0) per block.

    w = e2m1(code) * 2^(block_scale - 127)

Codes and scales equal those of compressed-tensors 0.17 (``MXFP4A16``) bit for bit in fp32 arithmetic.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from qerl_pl.quant.formats import Format
from qerl_pl.quant.nvfp4 import E2M1_CODES, e2m1_codes


def round_block_scale(block_amax: Tensor, _global_scale: Tensor) -> Tensor:
    """Choose the scale of each block of weights: the power of two s for which ``block_amax`` / s, the block's largest
    magnitude divided by s, lies in [3.5, 7). From 7 on, clipping to 6, the largest value of the 4-bit codes, would
    cause a large error. Returns log2(s) + 127 as uint8."""
    exponent = (block_amax.view(torch.int32) + (1 << 21)) >> 23  # biased; significands from 1.75 on are rounded up to 2
    return (exponent - 2).clamp_min(0).to(torch.uint8)


def effective_scale(block_scale: Tensor, _global_scale: Tensor) -> Tensor:
    """Convert block scales, which are exponents biased by 127, to powers of two, fp32 of equal shape."""
    bits = block_scale.int()
    return torch.where(bits == 0, 1 << 22, bits << 23).view(torch.float32)  # 2^-127 is subnormal


def nearby_block_scales(block_scale: Tensor) -> Iterator[Tensor]:
    """Yield candidates for block scales: the given powers of two, then half of each, then twice each."""
    for step in (0, -1, 1):
        yield (block_scale.int() + step).clamp(0, 254).to(torch.uint8)


MXFP4 = Format(
    name="mxfp4",
    block=32,
    values=E2M1_CODES,
    scale_dtype=torch.uint8,
    encode=e2m1_codes,
    round_scale=round_block_scale,
    effective_scale=effective_scale,
    nearby_scales=nearby_block_scales,
)
