"""NVFP4: four-bit E2M1 weights in blocks of 16 columns, an E4M3 scale a block, one scale a tensor.

    w = e2m1(code) * (e4m3(block_scale) * global_scale)                        (arXiv 2510.11696, eq. 6)

Codes and block scales equal those of compressed-tensors 0.17 (``NVFP4A16``, min-max) bit for bit, and so do dequantised
weights, when the arithmetic is fp32: weights are upcast first here, whereas compressed-tensors computes the scales in
the dtype of the weight, and its decompressor rounds the fp32 product to bf16 at the end.

The tensor scale is kept as a multiplier in fp64. compressed-tensors stores its reciprocal, a divisor in fp32, and
ModelOpt the multiplier in fp32; both survive in fp64 exactly. ``fp32(scale * (1 / divisor))`` is the correctly rounded
quotient for every E4M3 scale (where it is a normal number): the quotient of a 4-bit by a 24-bit significand is never
within 2^-49 of an fp32 rounding boundary, and fp64 errs by 2^-52.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from qerl_pl.quant.formats import Format, PackedWeight, decode, unpack

BLOCK = 16
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0
E2M1_CODES = E2M1 + tuple(-value for value in E2M1)  # a code is sign << 3 | index into E2M1
E4M3_MAX = 448.0
_ZERO_SCALE = 0x20  # E4M3 bits of 0.125, which replaces a block scale that rounds to zero
_E4M3_MAX_BITS = 0x7E

NVFP4Weight = PackedWeight  # codes [N, K/2] uint8; block_scale [N, K/16] uint8, bits of float8_e4m3fn; global_scale []


def tensor_scale(amax: Tensor) -> Tensor:
    """The multiplier that maps the largest block scale to E4M3's maximum.

    Args:
        amax: [] largest magnitude of the tensor, or of the tensors that share the scale.

    Returns:
        [] fp64. 1 for magnitudes whose divisor overflows fp32 (an all-zero tensor among them).
    """
    divisor = E4M3_MAX * E2M1_MAX / amax.float().clamp_min(torch.finfo(torch.float32).tiny)
    return 1 / torch.where(divisor.isfinite(), divisor, 1.0).double()


def scale_divisor(global_scale: Tensor) -> Tensor:
    """[] fp32 ``weight_global_scale`` as compressed-tensors stores it; the inverse of ``1 / divisor`` in fp64."""
    return (1 / global_scale.double()).float()


def round_block_scale(block_amax: Tensor, global_scale: Tensor) -> Tensor:
    """[...] uint8 E4M3 bits of the scale that maps a block's largest magnitude ([...] fp32) to 6."""
    scale = scale_divisor(global_scale) * (block_amax / E2M1_MAX)
    bits = scale.clamp_max(E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(bits == 0, _ZERO_SCALE, bits)


def effective_scale(block_scale: Tensor, global_scale: Tensor) -> Tensor:
    """fp32 scale of every block: the product of both scales, rounded once. Shape of block_scale."""
    table = torch.arange(256, dtype=torch.uint8, device=block_scale.device).view(torch.float8_e4m3fn)
    return (table.double() * global_scale.double()).float()[block_scale.int()]


def e2m1_codes(weight: Tensor, scale: Tensor) -> Tensor:
    """uint8 codes of the E2M1 values nearest to weight / scale; ties go to the even code, what exceeds 6 to 6."""
    values = weight / scale
    index = torch.bucketize(values.abs(), _midpoints(values.device), out_int32=True)
    return (index | (values < 0).int() << 3).to(torch.uint8)  # a negative underflow keeps its sign, -0 does not


def nearby_block_scales(block_scale: Tensor) -> Iterator[Tensor]:
    """The scales from 0.42 to 1.2 times the given ones: E4M3 has 8 steps an octave."""
    for step in (0, 1, 2, -1, -2, -3, -4, -5, -6, -7, -8, -9, -10):
        yield (block_scale.int() + step).clamp(1, _E4M3_MAX_BITS).to(torch.uint8)


def dequantize(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """[N, K] in ``dtype``: ``dequantize_reference`` and one rounding, bit for bit."""
    if weight.codes.is_cuda:
        from qerl_pl.kernels.dequantize import dequantize_nvfp4  # Triton is there where CUDA is

        return dequantize_nvfp4(weight.codes, weight.block_scale, weight.global_scale, dtype)
    return decode(weight.codes, effective_scale(weight.block_scale, weight.global_scale), E2M1_CODES, dtype)


def dequantize_reference(weight: PackedWeight) -> Tensor:
    """[N, K] fp32 by table look-up: slow, on any device, and the definition that every faster path is held to."""
    nibbles = unpack(weight.codes)
    magnitude = torch.tensor(E2M1, device=nibbles.device)[(nibbles & 7).long()]
    value = torch.where(nibbles >= 8, -magnitude, magnitude)
    scale = (weight.block_scale.view(torch.float8_e4m3fn).double() * weight.global_scale).float()  # [N, K/16]
    return value * scale.repeat_interleave(BLOCK, dim=1)


NVFP4 = Format(
    name="nvfp4",
    block=BLOCK,
    values=E2M1_CODES,
    scale_dtype=torch.uint8,
    encode=e2m1_codes,
    tensor_scale=tensor_scale,
    round_scale=round_block_scale,
    effective_scale=effective_scale,
    nearby_scales=nearby_block_scales,
    dequantize=dequantize,
)


@cache
def _midpoints(device: torch.device) -> Tensor:
    # bucketize counts the boundaries below a value; one just under a midpoint sends the tie up, to the even code.
    values = torch.tensor(E2M1, device="cpu")  # explicit: a default device, such as meta, must not get into the cache
    middle = (values[1:] + values[:-1]) / 2
    middle[1::2] = torch.nextafter(middle[1::2], values[:1])
    return middle.to(device)
