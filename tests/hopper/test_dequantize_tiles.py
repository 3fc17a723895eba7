"""The kernel that dequantises NVFP4 weights in tile order (the order in which the Hopper kernels read them). It runs on
the GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from qerl_pl.hopper.tile_order import to_tile_order
from qerl_pl.quant import formats
from qerl_pl.quant.formats import PackedWeight
from tests.hopper.nvfp4_linears import rows_of
from tests.kernels.conftest import _uninitialised_memory_is_nan  # noqa: F401
from tests.kernels.test_dequantize import DEVICE, DTYPES, draw, once_rounded, same_bits
from tests.reference.dequantize import dequantize_reference

KERNELS = "qerl_pl.hopper.dequantize"


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(64, 16), (192, 128), (128, 400)], ids=str)
def test_tile_order_equals_the_definition_bit_for_bit(kernels, shape, dtype):
    weight = draw(*shape)
    tiles = to_tile_order(weight)
    found = kernels.dequantize_tiles(tiles.codes, tiles.block_scale, weight.global_scale, dtype)
    assert same_bits(found, once_rounded(dequantize_reference(weight), dtype))


def test_every_code_under_every_scale_byte_in_tile_order(kernels):
    codes = torch.arange(16, dtype=torch.uint8).repeat(256, 1)
    scale = torch.arange(256, dtype=torch.uint8, device=DEVICE).unsqueeze(1)
    one = torch.tensor(0.7, dtype=torch.float64, device=DEVICE)
    weight = PackedWeight(formats.pack(codes).to(DEVICE), scale, one)
    tiles = to_tile_order(weight)
    found = kernels.dequantize_tiles(tiles.codes, tiles.block_scale, one, torch.float32)
    assert same_bits(found, dequantize_reference(weight))


def test_rows_of_a_fused_weight_in_tile_order_are_taken_where_they_are(kernels):
    weight = draw(256, 176)
    part = rows_of(to_tile_order(weight), 64, 192)
    found = kernels.dequantize_tiles(part.codes, part.block_scale, weight.global_scale, torch.float32)
    assert same_bits(found, dequantize_reference(weight)[64:192])
