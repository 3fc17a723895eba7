"""NVFP4: four-bit E2M1 weights in blocks of 16 columns, an E4M3 scale a block, one scale a tensor.

    w = e2m1(code) * (e4m3(block_scale) * global_scale)                        (arXiv 2510.11696, eq. 6)

Letters: N out, K in. Codes and block scales equal those of compressed-tensors 0.17 (``NVFP4A16``, min-max) bit for bit,
and so do dequantised weights, when the arithmetic is fp32: weights are upcast first here, whereas compressed-tensors
computes the scales in the dtype of the weight, and its decompressor rounds the fp32 product to bf16 at the end.

The tensor scale is kept as a multiplier in fp64. compressed-tensors stores its reciprocal, a divisor in fp32, and
ModelOpt the multiplier in fp32; both survive in fp64 exactly. ``fp32(scale * (1 / divisor))`` is the correctly rounded
quotient for every E4M3 scale (where it is a normal number): the quotient of a 4-bit by a 24-bit significand is never
within 2^-49 of an fp32 rounding boundary, and fp64 errs by 2^-52.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

BLOCK = 16
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_MAX = 6.0
E4M3_MAX = 448.0
_CHUNK = 1 << 24  # weights a step, which bounds the temporaries to about 0.2 GB
_ZERO_SCALE = 0x20  # E4M3 bits of 0.125, which replaces a block scale that rounds to zero


@dataclass(frozen=True)
class NVFP4Weight:
    """A packed weight matrix [N, K]."""

    codes: Tensor
    """[N, K/2] uint8, two codes a byte, the even column in the low nibble; a code is sign << 3 | index into E2M1."""
    block_scale: Tensor
    """[N, K/16] uint8, bits of float8_e4m3fn (uint8: immune to ``module.to(dtype)``)."""
    global_scale: Tensor
    """[] fp64, a multiplier. An fp32 multiplier is taken too."""


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


def quantize_nvfp4(weight: Tensor, global_scale: Tensor | None = None, *, name: str = "weight") -> NVFP4Weight:
    """Round a matrix to the nearest NVFP4 values under min-max scales.

    Args:
        weight: [N, K] floating, K a multiple of 16.
        global_scale: [] multiplier shared with other tensors; None: this tensor's own.
        name: what errors call the tensor.

    Raises:
        ValueError: the shape does not fit, or the weight holds NaN or infinity.
    """
    if weight.ndim != 2 or not weight.numel() or weight.shape[1] % BLOCK:
        raise ValueError(f"{name} has shape {list(weight.shape)}; expected [N, K] with K a multiple of {BLOCK}")
    amax = weight.abs().amax()
    if not amax.isfinite():
        raise ValueError(f"{name} holds NaN or infinity; expected finite weights")
    if global_scale is None:
        global_scale = tensor_scale(amax)
    block_scale = round_block_scale(weight.unflatten(1, (-1, BLOCK)).abs().amax(-1).float(), global_scale)
    return NVFP4Weight(round_codes(weight, block_scale, global_scale), block_scale, global_scale)


def round_block_scale(block_amax: Tensor, global_scale: Tensor) -> Tensor:
    """[...] uint8 E4M3 bits of the scale that maps a block's largest magnitude ([...] fp32) to 6."""
    scale = scale_divisor(global_scale) * (block_amax / E2M1_MAX)
    bits = scale.clamp_max(E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(bits == 0, _ZERO_SCALE, bits)


def round_codes(weight: Tensor, block_scale: Tensor, global_scale: Tensor) -> Tensor:
    """[N, K/2] uint8 codes nearest to weight [N, K] under given scales; ties go to the even code, excess to 6."""
    codes = torch.empty(weight.shape[0], weight.shape[1] // 2, dtype=torch.uint8, device=weight.device)
    for rows in row_chunks(weight):
        blocks = weight[rows].float().unflatten(1, (-1, BLOCK))
        blocks = blocks / effective_scale(block_scale[rows], global_scale).unsqueeze(-1)
        nibbles = e2m1_codes(blocks).flatten(1)  # [n, K]
        codes[rows] = nibbles[:, ::2] | nibbles[:, 1::2] << 4
    return codes


def e2m1_codes(values: Tensor) -> Tensor:
    """uint8 codes of the E2M1 values nearest to fp32 ones, of any shape. Underflow keeps its sign; -0 does not."""
    index = torch.bucketize(values.abs(), _midpoints(values.device), out_int32=True)
    return (index | (values < 0).int() << 3).to(torch.uint8)


def effective_scale(block_scale: Tensor, global_scale: Tensor) -> Tensor:
    """fp32 scale of every block: the product of both scales, rounded once. Shape of block_scale."""
    table = torch.arange(256, dtype=torch.uint8, device=block_scale.device).view(torch.float8_e4m3fn)
    return (table.double() * global_scale.double()).float()[block_scale.int()]


def dequantize(weight: NVFP4Weight, dtype: torch.dtype) -> Tensor:
    """[N, K] in ``dtype``: ``dequantize_reference`` and one rounding, bit for bit; looks up two columns a byte."""
    num_rows, num_bytes = weight.codes.shape
    out = torch.empty(num_rows, 2 * num_bytes, dtype=dtype, device=weight.codes.device)
    pairs = _pairs(weight.codes.device)
    for rows in row_chunks(out):
        scale = effective_scale(weight.block_scale[rows], weight.global_scale).unsqueeze(-1)  # [n, K/16, 1]
        values = pairs[weight.codes[rows].int()].view(*scale.shape[:2], BLOCK)
        out[rows] = values.mul_(scale).flatten(1)
    return out


def dequantize_reference(weight: NVFP4Weight) -> Tensor:
    """[N, K] fp32 by table look-up: slow, on any device, and the definition that every faster path is held to."""
    nibbles = torch.stack([weight.codes & 0xF, weight.codes >> 4], dim=-1).flatten(1)  # [N, K]
    magnitude = torch.tensor(E2M1, device=nibbles.device)[(nibbles & 7).long()]
    value = torch.where(nibbles >= 8, -magnitude, magnitude)
    scale = (weight.block_scale.view(torch.float8_e4m3fn).double() * weight.global_scale).float()  # [N, K/16]
    return value * scale.repeat_interleave(BLOCK, dim=1)


def row_chunks(matrix: Tensor) -> Iterator[slice]:
    """Slices of the rows, each of a bounded number of elements."""
    step = max(1, _CHUNK // max(1, matrix.shape[1]))
    return (slice(start, start + step) for start in range(0, matrix.shape[0], step))


@cache
def _midpoints(device: torch.device) -> Tensor:
    # bucketize counts the boundaries below a value; one just under a midpoint sends the tie up, to the even code.
    values = torch.tensor(E2M1, device="cpu")  # explicit: a default device, such as meta, must not get into the cache
    middle = (values[1:] + values[:-1]) / 2
    middle[1::2] = torch.nextafter(middle[1::2], values[:1])
    return middle.to(device)


@cache
def _pairs(device: torch.device) -> Tensor:
    # [256, 2] fp32: the two values of a byte
    values = torch.tensor(E2M1 + tuple(-value for value in E2M1), device="cpu")
    byte = torch.arange(256, device="cpu")
    return torch.stack([values[byte & 0xF], values[byte >> 4]], dim=1).to(device)
