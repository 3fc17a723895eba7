"""Common interface of 4-bit weight formats. Each weight is a 4-bit code, which stands for one of the format's 16
values. Consecutive weights of a row form a block, which has a block scale; in some formats the tensor also has a scale.

    w = values[code] * effective_scale(block_scale, global_scale)

Letters: N outputs, K inputs. All arithmetic is fp32, for every dtype of the weight.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

_CHUNK = 1 << 24  # weights that are converted at a time, which bounds temporary memory to about 0.2 GB


@dataclass(frozen=True)
class PackedWeight:
    """Weight matrix [N, K] in a 4-bit format: codes and scales. Block scales are stored as integers, which
    ``module.to(dtype)`` does not convert."""

    codes: Tensor
    """[N, K/2] uint8, two 4-bit codes per byte, that of the even column in the low nibble. Codes of NVFP4 may also be
    int32 words in tile order (``hopper/tile_order.py``); the block scales are then transposed."""
    block_scale: Tensor
    """[N, K/block], bits of the block scales in the format's ``scale_dtype``."""
    global_scale: Tensor
    """[] fp64 or fp32, the tensor scale, by which all values of the weight are multiplied; 1 in formats without one. If
    the object holds the weights of E experts concatenated along N, as ``dequantize`` accepts them, it is [E]."""


def no_tensor_scale(amax: Tensor) -> Tensor:
    """Return the tensor scale of formats that have none: 1, as [] fp64 on the device of ``amax``."""
    return torch.ones((), dtype=torch.float64, device=amax.device)


@dataclass(frozen=True)
class Format:
    """Description of a 4-bit weight format: the values of the 16 codes, the number of weights that share a block scale,
    and the functions that round weights to it. These functions take and return block scales as bits, in integers of
    ``scale_dtype``. Weights are fp32, and so are effective scales, by which the values of a block's codes are
    multiplied."""

    name: str
    block: int
    """Number of columns that share a scale."""
    values: tuple[float, ...]
    """Value of each of the 16 codes."""
    scale_dtype: torch.dtype
    """Integer dtype of ``PackedWeight.block_scale``."""
    encode: Callable[[Tensor, Tensor], Tensor]
    """Maps weights and the effective scales of their blocks, both of one shape, to the uint8 codes of the nearest
    values."""
    round_scale: Callable[[Tensor, Tensor], Tensor]
    """Maps the largest magnitude of each block, and the tensor scale, to the bits of the block scale that makes this
    magnitude representable (min-max)."""
    effective_scale: Callable[[Tensor, Tensor], Tensor]
    """Maps block scales and the tensor scale to the fp32 factor by which each block's values are multiplied."""
    nearby_scales: Callable[[Tensor], Iterator[Tensor]]
    """Yields block scales to try in place of the given ones when the quantiser searches for smaller rounding errors:
    first the given block scales, then smaller and larger ones. Argument and results are the bits of scales, all of one
    shape."""
    tensor_scale: Callable[[Tensor], Tensor] = no_tensor_scale
    """Maps the largest magnitude, [], of all weights that share one tensor scale to that tensor scale, [] fp64."""
    fast: Callable[[PackedWeight, torch.dtype], Tensor] | None = None
    """Faster implementation of ``dequantize`` for this format; None: ``decode`` is used."""

    def dequantize(self, weight: PackedWeight, dtype: torch.dtype) -> Tensor:
        """Dequantise a weight to [N, K]: ``values[code] * effective_scale`` in fp32, rounded once to the dtype."""
        if self.fast is not None:
            return self.fast(weight, dtype)
        return decode(weight.codes, self.effective_scale(weight.block_scale, weight.global_scale), self.values, dtype)


def quantize(weight: Tensor, fmt: Format, global_scale: Tensor | None = None, *, name: str = "weight") -> PackedWeight:
    """Round a matrix [N, K] to the nearest values of a 4-bit format, with block scales that make each block's largest
    magnitude representable (min-max). ``global_scale`` is the tensor scale, [], or [N] with one per row; None: it is
    computed from this matrix. Raises ValueError, which names the tensor ``name``, if the matrix is not finite, or K is
    no multiple of the block size."""
    if weight.ndim != 2 or not weight.numel() or weight.shape[1] % fmt.block:
        raise ValueError(f"{name} has shape {list(weight.shape)}; expected [N, K] with K a multiple of {fmt.block}")
    block_amax = weight.unflatten(1, (-1, fmt.block)).abs().amax(-1).float()
    amax = block_amax.amax()
    if not amax.isfinite():
        raise ValueError(f"{name} holds NaN or infinity; expected finite weights")
    if global_scale is None:
        global_scale = fmt.tensor_scale(amax)
    block_scale = fmt.round_scale(block_amax, global_scale.unsqueeze(1) if global_scale.ndim else global_scale)
    return PackedWeight(round_codes(weight, fmt, block_scale, global_scale), block_scale, global_scale)


def round_codes(weight: Tensor, fmt: Format, block_scale: Tensor, global_scale: Tensor) -> Tensor:
    """Round a weight [N, K] to the nearest values that a 4-bit format can represent with the given scales. Returns the
    4-bit codes, two per byte, [N, K/2] uint8. ``block_scale`` [N, K/block] has the bits of the block scales;
    ``global_scale`` is the tensor scale, [], or [N] with one per row."""
    codes = torch.empty(weight.shape[0], weight.shape[1] // 2, dtype=torch.uint8, device=weight.device)
    for rows in row_chunks(weight):
        scale = fmt.effective_scale(block_scale[rows], of_rows(global_scale, rows)).unsqueeze(-1)  # [n, K/block, 1]
        codes[rows] = pack(fmt.encode(weight[rows].float().unflatten(1, (-1, fmt.block)), scale).flatten(1))
    return codes


def pack(codes: Tensor) -> Tensor:
    """Pack 4-bit codes [N, K] uint8 into bytes [N, K/2], the code of the even column in the low four bits."""
    return codes[:, ::2] | codes[:, 1::2] << 4


def decode(codes: Tensor, scale: Tensor, values: tuple[float, ...], dtype: torch.dtype) -> Tensor:
    """Dequantise codes [N, K/2] uint8 of a format's 16 ``values`` to [N, K]: ``values[code] * scale`` in fp32, rounded
    once to ``dtype``; ``scale`` [N, K/block] fp32 is the factor of each block."""
    if codes.is_cuda:
        from qerl_pl.kernels.dequantize import dequantize_table  # needs Triton

        return dequantize_table(codes, scale, _table(values, codes.device), dtype)
    out = torch.empty(codes.shape[0], 2 * codes.shape[1], dtype=dtype, device=codes.device)
    pairs = _pairs(values, codes.device)
    for rows in row_chunks(out):
        blocks = pairs.index_select(0, codes[rows].int().flatten()).view(torch.float32)  # of all n K codes
        blocks = blocks.view(*scale[rows].shape, -1)  # [n, K/block, block]
        torch.mul(blocks, scale[rows].unsqueeze(-1), out=out[rows].view(blocks.shape))
    return out


def of_rows(global_scale: Tensor, rows: slice) -> Tensor:
    """Return the tensor scales of some rows of a matrix: those of ``rows`` if ``global_scale`` is [N], one per row; if
    it is [], one for all rows, it is returned unchanged."""
    return global_scale[rows] if global_scale.ndim else global_scale


def row_chunks(matrix: Tensor) -> Iterator[slice]:
    """Divide a matrix's rows into slices of at most ``_CHUNK`` elements (or one row), to bound temporary memory."""
    step = max(1, _CHUNK // max(1, matrix.shape[1]))
    return (slice(start, start + step) for start in range(0, matrix.shape[0], step))


# Devices and dtypes below are given explicitly, because results are cached, and torch's default device may be meta and
# its default dtype bf16, for example while vLLM loads a model.


@cache
def _table(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device="cpu").to(device)  # [16]


@cache
def _pairs(values: tuple[float, ...], device: torch.device) -> Tensor:
    table, byte = _table(values, torch.device("cpu")), torch.arange(256, device="cpu")
    pairs = torch.stack([table[byte & 0xF], table[byte >> 4]], dim=1)  # [256, 2] fp32
    return pairs.view(torch.float64).squeeze(1).to(device)  # [256]: looking up numbers is faster than rows of two
