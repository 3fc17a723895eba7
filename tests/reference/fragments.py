"""Tile order of NVFP4 weights, in which the CUDA kernels for Hopper read them, defined code by code."""

from itertools import product

import torch
from torch import Tensor

from qerl_pl.hopper.nvfp4_decode import BITS, K_BLOCK


def fragments(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Reorder the 4-bit codes [N, K] uint8 (one per byte) and block scales [N, K / 16] e4m3 of an NVFP4 weight to tile
    order (``hopper.tile_order``): words [K / 16, 2 N] int32 and scales [K / 16, N] e4m3."""
    outputs, inputs = codes.shape
    parts = codes.view(
        outputs // 64, 4, 2, 8, inputs // K_BLOCK, 2, 4, 2
    )  # [64s, word, half, g, k-block, upper, c, odd]
    order = parts.permute(4, 0, 3, 6, 1, 7, 2, 5).reshape(inputs // K_BLOCK, -1, 8).long()
    words = torch.zeros_like(order[..., 0])
    for code, bit in product(range(8), range(4)):
        words |= (order[..., code] >> bit & 1) << (BITS[code % 4][bit] + code // 4 * 16) % 32
    packed = (words - (words >> 31 << 32)).int()  # the same 32 bits as a signed int32
    grouped = scales.view(torch.uint8).view(outputs // 64, 8, 8, -1).permute(3, 0, 2, 1)
    return packed, grouped.reshape(-1, outputs).contiguous().view(scales.dtype)
