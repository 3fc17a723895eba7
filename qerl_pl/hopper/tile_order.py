"""Tile order: the order of NVFP4 codes and scales in which this project's CUDA kernels for Hopper read a weight [N, K]
with N outputs and K inputs.

A checkpoint stores the codes of each output's row contiguously (row order). In tile order, the codes of each tile of 64
outputs x 16 inputs are contiguous. Within a tile, the 16 bytes that one lane of a warp needs for ``wgmma`` are
contiguous: four words, one per 16 outputs. With g = lane // 4 and c = lane % 4, the eight codes of a word are (output
g, input 2c), (g, 2c + 8), (g + 8, 2c), (g + 8, 2c + 8), then the same outputs at inputs 2c + 1 and 2c + 9; ``BITS`` has
the positions of their bits. Within the scales of 64 outputs, the scale of output 8 j + g is at position 8 g + j. A
weight in tile order is a ``PackedWeight`` whose codes are int32 words [K / 16, 2 N] and whose block scales are [K / 16,
N]; in row order, codes are uint8. The engine fuses q, k and v, and also gate and up, into one matrix each. Outputs from
one multiple of 64 to another are contiguous columns of the tensors in tile order, so the trainer's separate layers can
be views of the fused matrix.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, product

import torch
from torch import Tensor

from qerl_pl.hopper.nvfp4_decode import BITS
from qerl_pl.quant.formats import PackedWeight
from qerl_pl.quant.nvfp4 import dequantize as dequantize_rows

TILE = 64  # outputs of a tile: their codes for 16 inputs are contiguous
WHOLE_INPUTS = 64  # the native kernels compute linears whose inputs are a multiple of this


def fits(shapes: Sequence[tuple[int, int]]) -> bool:
    """Return whether the CUDA kernels support the linear layer that vLLM makes by fusing layers of the given shapes (N
    outputs, K inputs)."""
    outputs, inputs = [rows for rows, _ in shapes], {columns for _, columns in shapes}
    whole = all(rows % TILE == 0 for rows in outputs)
    return whole and len(inputs) == 1 and inputs.pop() % WHOLE_INPUTS == 0


def is_in_tile_order(weight: PackedWeight) -> bool:
    """Return whether a weight is in tile order and not in row order."""
    return weight.codes.dtype == torch.int32


def to_tile_order(weight: PackedWeight) -> PackedWeight:
    """Copy an NVFP4 weight from row order to tile order, with temporary memory of about twice the bytes of the codes.
    Raises ValueError if the number of outputs is not a multiple of 64."""
    outputs, blocks = weight.block_scale.shape
    if outputs % TILE:
        raise ValueError(f"the weight has {outputs} outputs; expected a multiple of {TILE} for tile order")
    scales = weight.block_scale.view(outputs // TILE, 8, 8, blocks).permute(3, 0, 2, 1)  # [k-block, tile, g, 8s]
    codes = words_in_tile_order(_words(weight.codes, blocks))
    return PackedWeight(codes, scales.reshape(blocks, outputs), weight.global_scale)


def _words(codes: Tensor, blocks: int) -> Tensor:
    """Pack 4-bit codes in row order into int32 words, in tile order except for the bits inside each word."""
    # In row order, a k-block of 16 inputs has 8 bytes: byte c, for c from 0 to 3, has the codes of inputs 2c and 2c +
    # 1, and byte 4 + c (``upper``) those of inputs 2c + 8 and 2c + 9. g is the index of an output among 8.
    parts = codes.view(-1, 4, 2, 8, blocks, 2, 4)  # [tile, word, half, g, k-block, upper, c]
    lower, upper = parts.unbind(5)  # inputs 2c, 2c + 1 and inputs 2c + 8, 2c + 9
    even, odd = (lower & 0xF) | (upper << 4), (lower >> 4) | (upper & 0xF0)  # [tile, word, half, g, k-block, c]
    words = torch.stack([even, odd]).permute(5, 1, 4, 6, 2, 0, 3)  # [k-block, tile, g, c, word, odd, half]
    return words.reshape(blocks, -1).view(torch.int32)


def to_row_order(weight: PackedWeight) -> PackedWeight:
    """Copy an NVFP4 weight from tile order back to row order; the inverse of ``to_tile_order``."""
    blocks, outputs = weight.block_scale.shape
    words = _moved(weight.codes.contiguous(), {-up: before for up, (before, _) in _moves().items()})
    parts = words.view(torch.uint8).view(blocks, outputs // TILE, 8, 4, 4, 2, 2)
    even, odd = parts.unbind(5)  # [k-block, tile, g, c, word, half]
    both = torch.stack([(even & 0xF) | (odd << 4), (even >> 4) | (odd & 0xF0)])  # lower, upper
    codes = both.permute(2, 5, 6, 3, 1, 0, 4).reshape(outputs, -1)  # [tile, word, half, g, k-block, upper, c]
    scales = weight.block_scale.reshape(blocks, outputs // TILE, 8, 8).permute(1, 3, 2, 0).reshape(outputs, blocks)
    return PackedWeight(codes, scales, weight.global_scale)


def dequantize(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Dequantise a weight in tile order to [N, K] of ``dtype``."""
    if not weight.codes.is_cuda:
        return dequantize_rows(to_row_order(weight), dtype)
    from qerl_pl.hopper.dequantize import dequantize_tiles  # needs Triton

    return dequantize_tiles(weight.codes, weight.block_scale, weight.global_scale, dtype)


def words_in_tile_order(words: Tensor) -> Tensor:
    """Move the bits of int32 words of eight consecutive 4-bit codes to where the kernels read them (``BITS``)."""
    return _moved(words, {up: after for up, (_, after) in _moves().items()})


def _moves() -> dict[int, tuple[int, int]]:
    """Return how ``words_in_tile_order`` moves the bits of a word: a dict from distances, in bits and positive towards
    higher bits, to pairs of masks. The masks select the bits that move by this distance, the first at their positions
    before the move, the second at those after it."""
    moves: dict[int, tuple[int, int]] = {}
    for code, bit in product(range(8), range(4)):
        old, new = 4 * code + bit, (BITS[code % 4][bit] + code // 4 * 16) % 32
        before, after = moves.get(new - old, (0, 0))
        moves[new - old] = before | 1 << old, after | 1 << new
    return moves


def _moved(words: Tensor, masks: Mapping[int, int]) -> Tensor:
    """Shift ``words`` left by each key of ``masks``, keep the bits that the key's mask selects, and return the bitwise
    or of all results."""
    result = torch.zeros_like(words)
    for up, mask in masks.items():
        moved = words << up if up > 0 else words >> -up
        result |= moved.bitwise_and_(mask - (mask >> 31 << 32))  # the same 32 bits as a signed number
    return result


def fused(weights: Sequence[PackedWeight]) -> list[PackedWeight]:
    """Copy weights with equal K from row order into one buffer in tile order, and return views of this buffer."""
    tiles = [to_tile_order(weight) for weight in weights]
    rows = [weight.block_scale.shape[1] for weight in tiles]
    codes = torch.cat([weight.codes for weight in tiles], dim=1).split([2 * count for count in rows], dim=1)
    scales = torch.cat([weight.block_scale for weight in tiles], dim=1).split(rows, dim=1)
    parts = zip(codes, scales, tiles, strict=True)
    return [PackedWeight(words, bits, weight.global_scale) for words, bits, weight in parts]


def whole_of(views: Sequence[PackedWeight]) -> PackedWeight | None:
    """Return, without a copy, the fused weight whose consecutive parts are ``views``, as ``fused`` returns them.
    Returns None if the views are not, in this order, all parts of one buffer."""
    if not all(map(is_in_tile_order, views)):
        return None
    first, outputs = views[0], views[0].codes.stride(0) // 2
    for tensors, width in (([view.codes for view in views], 2), ([view.block_scale for view in views], 1)):
        starts = list(accumulate((tensor.shape[1] for tensor in tensors), initial=0))
        places = [tensor.storage_offset() for tensor in tensors]
        buffers = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        strides = {tensor.stride() for tensor in tensors}
        if places != starts[:-1] or starts[-1] != outputs * width or len(buffers) > 1 or len(strides) > 1:
            return None
    codes, scales = (
        tensor.as_strided((len(tensor), width), (width, 1), 0)
        for tensor, width in ((first.codes, 2 * outputs), (first.block_scale, outputs))
    )
    return PackedWeight(codes, scales, first.global_scale)
