"""Triton kernel that dequantises NVFP4 weights in tile order (``tile_order.py``). Letters: N outputs, K inputs."""

# pyright: reportCallIssue=false, reportOperatorIssue=false
# Triton's type hints do not have its launch options and scalars.
import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl_pl.kernels.launching import launch

BLOCKS, WARPS = 8, 4  # k-blocks of one tile, and warps, per program


def dequantize_tiles(codes: Tensor, block_scale: Tensor, global_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantise an NVFP4 weight in tile order to [N, K] of ``dtype``. ``codes`` [K / 16, 2 N] int32 have eight 4-bit
    codes per word; ``block_scale`` [K / 16, N] are E4M3 bits, and ``global_scale`` multiplies all values. The first two
    may be views of the columns of some outputs. A program reads 512 contiguous bytes of codes per 16 inputs, and writes
    64 rows of 128 values."""
    assert codes.stride(1) == block_scale.stride(1) == 1, (codes.stride(), block_scale.stride())
    (blocks, rows), columns = block_scale.shape, 16 * block_scale.shape[0]
    out = torch.empty(rows, columns, dtype=dtype, device=codes.device)
    grid, constants = (rows // 64, triton.cdiv(blocks, BLOCKS)), {"NUM_BLOCKS": blocks, "BLOCKS": BLOCKS}
    arguments = codes, block_scale, global_scale, out, codes.stride(0), block_scale.stride(0)
    with torch.cuda.device_of(codes):
        launch(_tile_kernel, grid, arguments, constants, num_warps=WARPS)
    return out


@triton.jit
def _tile_kernel(
    codes, block_scale, global_scale, out, codes_stride, scale_stride, NUM_BLOCKS: tl.constexpr, BLOCKS: tl.constexpr
):
    tile = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCKS
    block = first + tl.arange(0, BLOCKS).to(tl.int64)
    inside = (block < NUM_BLOCKS)[:, None]
    # Codes are read once and values written once, so the L2 cache is told to drop both first. This is 2 % faster.
    from_codes = codes + block[:, None] * codes_stride + tile * 128 + tl.arange(0, 128)[None, :]
    from_scales = block_scale + block[:, None] * scale_stride + tile * 64 + tl.arange(0, 64)[None, :]
    packed = tl.load(from_codes, mask=inside, eviction_policy="evict_first")
    bits = tl.load(from_scales, mask=inside, eviction_policy="evict_first")
    # The 64 e4m3 scales of each k-block (64 outputs, 16 inputs) and the 4-bit codes are converted to fp32 by the steps
    # that the comments in ``_nvfp4_kernel`` of ``kernels/dequantize.py`` explain.
    bits = bits.to(tl.int32)  # [BLOCKS, 64]
    scaled_down = ((bits & 0x80) << 24 | (bits & 0x7F) << 20).to(tl.float32, bitcast=True).to(tl.float64)
    scale = (scaled_down * (tl.load(global_scale).to(tl.float64) * 2.0**120)).to(tl.float32)
    scale = tl.where((bits & 0x7F) == 0x7F, float("nan"), scale)
    # A tile has 64 scales per k-block, one for each output. The scale of output 8 j + g is at position 8 g + j (g and j
    # from 0 to 7). The shape below splits j into ``word`` (0 to 3) and ``half`` (0 or 1): j = 2 word + half.
    scale = tl.reshape(scale, (BLOCKS, 8, 1, 4, 1, 2, 1))  # [block, g, c, word, odd, half, upper]
    # A tile has 8 x 4 x 4 words of 32 bits (g, c, word) per k-block, each with eight 4-bit codes. Code number 4 odd + 2
    # half + upper of a word belongs to output 16 word + 8 half + g and input 8 upper + 2 c + odd, where odd, half and
    # upper are 0 or 1. Two codes, of odd 0 and 1, are moved at a time, to bits 15 and 8 to 6 and to bits 31 and 24 to
    # 22, as ``dequantize`` in `nvfp4.cuh` does.
    word = packed.to(tl.uint32, bitcast=True)
    lower = tl.join(word, word >> 6 | word << 26)  # [BLOCKS, 128, half]
    upper = tl.join(word >> 3 | word << 29, (word & 0x001B001B) * 0x4108)
    pairs = tl.join(lower, upper)  # [BLOCKS, 128, half, upper]
    up = (16 - 16 * tl.arange(0, 2)).to(tl.uint32)[None, None, :, None, None]
    value = (pairs[:, :, None] << up) & 0x81C00000  # [BLOCKS, 128, odd, half, upper]
    value = value.to(tl.float32, bitcast=True) * 2.0**126
    value = (tl.reshape(value, (BLOCKS, 8, 4, 4, 2, 2, 2)) * scale).to(out.dtype.element_ty)
    value = tl.permute(value, (3, 5, 1, 0, 6, 2, 4))  # [word, half, g, block, upper, c, odd]
    value = tl.reshape(value, (64, BLOCKS * 16))
    row, column = tile * 64 + tl.arange(0, 64), first * 16 + tl.arange(0, BLOCKS * 16)
    place = out + row[:, None] * (NUM_BLOCKS * 16) + column[None, :]
    tl.store(place, value, mask=(column < NUM_BLOCKS * 16)[None, :], cache_modifier=".cs")
