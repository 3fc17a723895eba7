"""Four-bit formats behind one interface: 16 values, a scale for each block of a row, maybe one for the tensor.

    w = values[code] * effective_scale(block_scale, global_scale)

Letters: N out, K in. All arithmetic is fp32, whatever the dtype of the weight. NVFP4, MXFP4 and NF4 are instances of
``Format``; a dense bf16 base needs none, it is an ``nn.Linear``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

_CHUNK = 1 << 24  # weights a step, which bounds the temporaries to about 0.2 GB


@dataclass(frozen=True)
class PackedWeight:
    """A packed weight matrix [N, K] of some format. Scales are kept as bits, out of reach of ``module.to(dtype)``."""

    codes: Tensor
    """[N, K/2] uint8, two codes a byte, the even column in the low nibble."""
    block_scale: Tensor
    """[N, K/block], the bits of the block scales in the format's ``scale_dtype``."""
    global_scale: Tensor
    """[] fp64, a multiplier (fp32 is taken too); 1 in formats without one."""


@dataclass(frozen=True)
class Format:
    """What distinguishes one four-bit format from another."""

    name: str
    block: int
    """Columns that share a scale."""
    values: tuple[float, ...]
    """[16] what the codes stand for, in units of the block's scale."""
    scale_dtype: torch.dtype
    """Integer dtype of ``PackedWeight.block_scale``."""
    encode: Callable[[Tensor, Tensor], Tensor]
    """(weights, their scales), fp32 of any shapes that broadcast -> uint8 codes of the nearest values."""
    tensor_scale: Callable[[Tensor], Tensor]
    """[] largest magnitude of the tensors that share it -> [] fp64 multiplier."""
    round_scale: Callable[[Tensor, Tensor], Tensor]
    """(largest magnitude of each block in fp32, global_scale) -> bits of its scale."""
    effective_scale: Callable[[Tensor, Tensor], Tensor]
    """(bits, global_scale) -> fp32 scale of every block."""
    nearby_scales: Callable[[Tensor], Iterator[Tensor]]
    """Bits of min-max scales -> the bits to try in their place, themselves first."""
    dequantize: Callable[[PackedWeight, torch.dtype], Tensor]
    """-> [N, K], the definition above and one rounding to the dtype."""


def quantize(weight: Tensor, fmt: Format, global_scale: Tensor | None = None, *, name: str = "weight") -> PackedWeight:
    """Round a matrix to the nearest values of a format under min-max scales.

    Args:
        weight: [N, K] floating, K a multiple of the format's block.
        fmt: the format.
        global_scale: [] multiplier shared with other tensors; None: this tensor's own.
        name: what errors call the tensor.

    Raises:
        ValueError: the shape does not fit, or the weight holds NaN or infinity.
    """
    if weight.ndim != 2 or not weight.numel() or weight.shape[1] % fmt.block:
        raise ValueError(f"{name} has shape {list(weight.shape)}; expected [N, K] with K a multiple of {fmt.block}")
    block_amax = weight.unflatten(1, (-1, fmt.block)).abs().amax(-1).float()
    amax = block_amax.amax()
    if not amax.isfinite():
        raise ValueError(f"{name} holds NaN or infinity; expected finite weights")
    if global_scale is None:
        global_scale = fmt.tensor_scale(amax)
    block_scale = fmt.round_scale(block_amax, global_scale)
    return PackedWeight(round_codes(weight, fmt, block_scale, global_scale), block_scale, global_scale)


def round_codes(weight: Tensor, fmt: Format, block_scale: Tensor, global_scale: Tensor) -> Tensor:
    """[N, K/2] uint8 packed codes nearest to weight [N, K] under given scales."""
    codes = torch.empty(weight.shape[0], weight.shape[1] // 2, dtype=torch.uint8, device=weight.device)
    for rows in row_chunks(weight):
        scale = fmt.effective_scale(block_scale[rows], global_scale).unsqueeze(-1)  # [n, K/block, 1]
        codes[rows] = pack(fmt.encode(weight[rows].float().unflatten(1, (-1, fmt.block)), scale).flatten(1))
    return codes


def pack(codes: Tensor) -> Tensor:
    """[N, K] uint8 codes below 16 -> [N, K/2] bytes."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def unpack(packed: Tensor) -> Tensor:
    """[N, K/2] bytes -> [N, K] codes."""
    return torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(1)


def decode(codes: Tensor, scale: Tensor, values: tuple[float, ...], dtype: torch.dtype) -> Tensor:
    """[N, K] in ``dtype``; off the GPU by looking up the two values of a byte at once.

    Args:
        codes: [N, K/2] packed.
        scale: [N, number of blocks] fp32.
        values: of the format.
        dtype: of the result; the products are fp32.
    """
    if codes.is_cuda:
        from qerl_pl.kernels.dequantize import dequantize_table  # Triton is there where CUDA is

        return dequantize_table(codes, scale, _table(values, codes.device), dtype)
    out = torch.empty(codes.shape[0], 2 * codes.shape[1], dtype=dtype, device=codes.device)
    pairs = _pairs(values, codes.device)
    for rows in row_chunks(out):
        blocks = pairs[codes[rows].int()].view(*scale[rows].shape, -1)  # [n, K/block, block]
        out[rows] = blocks.mul_(scale[rows].unsqueeze(-1)).flatten(1)
    return out


def dequantize_reference(weight: PackedWeight, fmt: Format) -> Tensor:
    """[N, K] fp32: slow, on any device, and the definition that every faster path is held to."""
    value = torch.tensor(fmt.values, device=weight.codes.device)[unpack(weight.codes).long()]
    return value * fmt.effective_scale(weight.block_scale, weight.global_scale).repeat_interleave(fmt.block, dim=1)


def row_chunks(matrix: Tensor) -> Iterator[slice]:
    """Slices of the rows, each of a bounded number of elements."""
    step = max(1, _CHUNK // max(1, matrix.shape[1]))
    return (slice(start, start + step) for start in range(0, matrix.shape[0], step))


@cache
def _table(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, device="cpu").to(device)  # [16] fp32; the device is explicit as below


@cache
def _pairs(values: tuple[float, ...], device: torch.device) -> Tensor:
    # [256, 2] fp32. The device is explicit: a default one, such as meta, must not get into the cache.
    table = torch.tensor(values, device="cpu")
    byte = torch.arange(256, device="cpu")
    return torch.stack([table[byte & 0xF], table[byte >> 4]], dim=1).to(device)
