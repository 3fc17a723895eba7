"""Conversion of NVFP4 codes and scales to tile order, the order in which the Hopper kernels read them, and back."""

from __future__ import annotations

import pytest
import torch

from qerl_pl.hopper.tile_order import is_in_tile_order, to_row_order, to_tile_order
from qerl_pl.quant import nvfp4
from qerl_pl.quant.formats import PackedWeight
from tests.hopper.nvfp4_linears import rows_of
from tests.reference.dequantize import unpack
from tests.reference.fragments import fragments

SHAPES = [(64, 16), (128, 48), (192, 272)]


def draw(rows: int, cols: int) -> PackedWeight:
    """Draw a weight whose codes and scales can be any byte."""
    generator = torch.Generator().manual_seed(rows * cols)
    codes = torch.randint(256, (rows, cols // 2), generator=generator, dtype=torch.uint8)
    scale = torch.randint(256, (rows, cols // 16), generator=generator, dtype=torch.uint8)
    return PackedWeight(codes, scale, torch.tensor(1 / 2688, dtype=torch.float64))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_the_order_that_the_decoding_kernels_define(shape):
    weight = draw(*shape)
    words, scales = fragments(unpack(weight.codes), weight.block_scale)
    found = to_tile_order(weight)
    assert is_in_tile_order(found)
    assert torch.equal(found.codes, words)
    assert torch.equal(found.block_scale, scales)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_there_and_back(shape):
    weight = draw(*shape)
    back = to_row_order(to_tile_order(weight))
    assert torch.equal(back.codes, weight.codes)
    assert torch.equal(back.block_scale, weight.block_scale)
    assert not is_in_tile_order(back)


def test_rows_of_a_larger_weight_are_views_of_it():
    weight, fused = draw(256, 80), to_tile_order(draw(256, 80))
    part = rows_of(fused, 64, 192)
    assert part.codes.untyped_storage().data_ptr() == fused.codes.untyped_storage().data_ptr()
    back = to_row_order(part)
    assert torch.equal(back.codes, weight.codes[64:192])
    assert torch.equal(back.block_scale, weight.block_scale[64:192])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_dequantises_to_the_same_bits(dtype):
    weight = draw(128, 96)
    weight.block_scale[weight.block_scale & 0x7F == 0x7F] = 0x40  # no NaN
    assert torch.equal(nvfp4.dequantize(to_tile_order(weight), dtype), nvfp4.dequantize(weight, dtype))


def test_rows_that_are_not_whole_tiles_are_refused():
    with pytest.raises(ValueError, match="96 outputs; expected a multiple of 64"):
        to_tile_order(draw(96, 32))
