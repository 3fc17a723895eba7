"""NVFP4: 4-bit E2M1 weights in blocks of 16 columns, with an E4M3 scale per block and one scale per tensor.

    w = e2m1(code) * (e4m3(block_scale) * global_scale)                        (arXiv 2510.11696, eq. 6)

Codes, block scales and dequantised weights equal those of compressed-tensors 0.17 (``NVFP4A16``, min-max) bit for bit
if that library computes in fp32. Here weights are converted to fp32 first, whereas compressed-tensors computes scales
in the dtype of the weight; its decompressor also rounds the fp32 product to bf16 at the end.

The tensor scale is kept in fp64. Checkpoints by compressed-tensors store its reciprocal r in fp32, those by ModelOpt
the scale itself in fp32; both can be recovered from the fp64 number exactly. compressed-tensors divides block scales by
r, and here they are multiplied by 1 / r in fp64 and rounded to fp32. For normal numbers the results are equal, because
the quotient of a 4-bit and a 24-bit significand is never within 2^-49 of an fp32 rounding boundary, and the fp64 error
is 2^-52.

Letters: N outputs, K inputs of a weight matrix, E weight matrices of equal shape, such as those of experts.
"""

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from qerl_pl import native
from qerl_pl.quant.formats import Format, PackedWeight, decode

BLOCK = 16
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0
E2M1_CODES = E2M1 + tuple(-value for value in E2M1)  # a code is sign << 3 | index into E2M1
E4M3_MAX = 448.0
_ZERO_SCALE = 0x20  # bits of 0.125 in E4M3, which is stored instead of a block scale that would round to zero
_E4M3_MAX_BITS = 0x7E


def tensor_scale(amax: Tensor) -> Tensor:
    """Compute the tensor scale, [] fp64, with which the largest block scale is 448, E4M3's maximum, from the largest
    magnitude ``amax``; 1 if its reciprocal would overflow fp32, as for tensors of zeros."""
    divisor = E4M3_MAX * E2M1_MAX / amax.float().clamp_min(torch.finfo(torch.float32).tiny)
    return 1 / torch.where(divisor.isfinite(), divisor, 1.0).double()


def scale_divisor(global_scale: Tensor) -> Tensor:
    """Return the tensor scale's reciprocal, [] fp32, which compressed-tensors stores as ``weight_global_scale``."""
    return (1 / global_scale.double()).float()


def round_block_scale(block_amax: Tensor, global_scale: Tensor) -> Tensor:
    """Return the block scales, as E4M3 bits, that map each block's largest magnitude ``block_amax``, [...] fp32, to
    about 6, E2M1's maximum."""
    scale = scale_divisor(global_scale) * (block_amax / E2M1_MAX)
    bits = scale.clamp_max(E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(bits == 0, _ZERO_SCALE, bits)


def effective_scale(block_scale: Tensor, global_scale: Tensor) -> Tensor:
    """Return the factor of each block: its block scale (E4M3 bits, uint8) times the tensor scale, rounded once to fp32,
    in the shape of ``block_scale``. ``global_scale`` is the tensor scale, [], or [E] if ``block_scale`` holds, one
    after the other, the block scales of E weight matrices of equal shape."""
    table = torch.arange(256, dtype=torch.uint8, device=block_scale.device).view(torch.float8_e4m3fn)
    factors = (table.double() * global_scale.double().unsqueeze(-1)).float()  # [256] or [E, 256]
    if global_scale.ndim == 0:
        return factors.index_select(0, block_scale.int().flatten()).view(block_scale.shape)
    return factors.gather(1, block_scale.view(len(factors), -1).long()).view(block_scale.shape)


def e2m1_codes(weight: Tensor, scale: Tensor) -> Tensor:
    """Return the uint8 codes of the E2M1 values nearest to weight / scale; ties are rounded to the even code."""
    values = weight / scale
    index = torch.bucketize(values.abs(), _midpoints(values.device), out_int32=True)
    return (index | (values < 0).int() << 3).to(torch.uint8)  # sign bit also for values that round to -0


def nearby_block_scales(block_scale: Tensor) -> Iterator[Tensor]:
    """Yield the block scales that the quantiser tries for a smaller rounding error: the given ones, then the next two
    larger and the next ten smaller E4M3 values, about 0.42 to 1.2 times the given scale. Argument and results are the
    bits of E4M3 numbers, uint8."""
    for step in (0, 1, 2, -1, -2, -3, -4, -5, -6, -7, -8, -9, -10):
        yield (block_scale.int() + step).clamp(1, _E4M3_MAX_BITS).to(torch.uint8)


def dequantize(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Dequantise an NVFP4 weight to [N, K]: the weights are computed in fp32 and rounded once to ``dtype``."""
    if weight.codes.dtype != torch.uint8:
        return native.dequantize(weight, dtype)
    if weight.codes.is_cuda:
        from qerl_pl.kernels.dequantize import dequantize_nvfp4  # needs Triton

        return dequantize_nvfp4(weight.codes, weight.block_scale, weight.global_scale, dtype)
    return decode(weight.codes, effective_scale(weight.block_scale, weight.global_scale), E2M1_CODES, dtype)


NVFP4 = Format(
    name="nvfp4",
    block=BLOCK,
    values=E2M1_CODES,
    scale_dtype=torch.uint8,
    encode=e2m1_codes,
    round_scale=round_block_scale,
    effective_scale=effective_scale,
    nearby_scales=nearby_block_scales,
    tensor_scale=tensor_scale,
    fast=dequantize,
)


@cache
def _midpoints(device: torch.device) -> Tensor:
    # torch.bucketize counts the boundaries below a value, so a value on a boundary gets the lower code. Every second
    # boundary is therefore moved just below the midpoint of two values, so that a tie there gets the upper code, which
    # is even.
    # Device and dtype are given explicitly, because torch's default device may be meta and its default dtype bf16.
    values = torch.tensor(E2M1, dtype=torch.float32, device="cpu")
    middle = (values[1:] + values[:-1]) / 2
    middle[1::2] = torch.nextafter(middle[1::2], values[:1])
    return middle.to(device)
