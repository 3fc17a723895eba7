"""Laws that every four-bit format obeys, and MXFP4 and NF4 against compressed-tensors and bitsandbytes, bit for bit."""

from __future__ import annotations

import bitsandbytes.functional
import pytest
import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.quant_scheme import MXFP4A16
from compressed_tensors.quantization.utils import calculate_qparams
from torch import Tensor
from torch.nn import functional as F

from qerl_pl.quant.formats import Format, PackedWeight, dequantize_reference, pack, quantize, unpack
from qerl_pl.quant.mxfp4 import MXFP4
from qerl_pl.quant.nf4 import NF4
from qerl_pl.quant.nvfp4 import NVFP4
from tests.packed import frozen_linear

FORMATS = [NVFP4, MXFP4, NF4]
MXFP4_ARGS: QuantizationArgs = MXFP4A16["weights"]

every_format = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)


def random_weight(rows: int, cols: int, *, spread: float = 0.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.exp(spread * torch.randn(rows, cols // 32, 1, generator=generator))
    return (torch.randn(rows, cols // 32, 32, generator=generator) * scale).flatten(1)


def special_weights() -> dict[str, Tensor]:
    weight = random_weight(4, 192)
    zero_block = weight.clone()
    zero_block[1, :64] = 0
    outlier = weight.clone()
    outlier[:, 7::32] *= 1000
    exponents = torch.arange(-60, 60).view(-1, 1)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(24) * 2.0**exponents
    boundary = torch.cat([torch.tensor([1.75, 1.7499999, 3.5, 3.4999998, 1.0, 6.0, 7.0, 0.1]).repeat(24).view(1, -1)])
    return {
        "normal": weight,
        "spread": random_weight(6, 192, spread=4.0),
        "zero block": zero_block,
        "zero": torch.zeros(2, 192),
        "outlier": outlier,
        "ties": ties,
        "boundary": torch.cat([boundary, -boundary]),
        "denormal": weight * 1e-40,
        "small": weight * 1e-36,
        "large": weight * 1e36,
    }


every_weight = pytest.mark.parametrize("kind", special_weights())


@every_format
@every_weight
def test_fast_dequantisation_equals_the_reference(fmt: Format, kind: str) -> None:
    packed = quantize(special_weights()[kind], fmt)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert torch.equal(fmt.dequantize(packed, dtype), dequantize_reference(packed, fmt).to(dtype))


@every_format
@every_weight
def test_each_weight_takes_the_nearest_value_of_its_block(fmt: Format, kind: str) -> None:
    weight = special_weights()[kind]
    if weight.abs().max() < torch.finfo(torch.float32).tiny:
        return  # quotients of denormals are not exact
    packed = quantize(weight, fmt)
    scale = fmt.effective_scale(packed.block_scale, packed.global_scale).repeat_interleave(fmt.block, 1).double()
    grid = torch.tensor(fmt.values, dtype=torch.float64) * scale.unsqueeze(-1)  # [N, K, 16]
    best = (grid - weight.double().unsqueeze(-1)).abs().amin(-1)
    error = (dequantize_reference(packed, fmt).double() - weight.double()).abs()
    assert (error <= best + 1e-6 * scale).all()


@every_format
def test_quantising_again_under_the_same_scales_changes_nothing(fmt: Format) -> None:
    weight = random_weight(5, 192)
    packed = quantize(weight, fmt)
    dense = dequantize_reference(packed, fmt)
    codes = pack(
        fmt.encode(dense, fmt.effective_scale(packed.block_scale, packed.global_scale).repeat_interleave(fmt.block, 1))
    )
    assert torch.equal(dequantize_reference(PackedWeight(codes, packed.block_scale, packed.global_scale), fmt), dense)


@every_format
def test_the_first_of_the_nearby_scales_are_the_scales_themselves_and_all_decode(fmt: Format) -> None:
    packed = quantize(random_weight(3, 192, spread=2.0), fmt)
    nearby = list(fmt.nearby_scales(packed.block_scale))
    assert torch.equal(nearby[0], packed.block_scale)
    assert all(bits.dtype == fmt.scale_dtype for bits in nearby)
    decoded = torch.stack([fmt.effective_scale(bits, packed.global_scale) for bits in nearby])
    assert decoded.isfinite().all()
    assert (decoded > 0).all()
    assert (decoded.amin(0) < 0.65 * decoded[0]).all()


@every_format
def test_bits_a_weight(fmt: Format) -> None:
    packed = quantize(random_weight(8, 192), fmt)
    bits = 8 * (packed.codes.nbytes + packed.block_scale.nbytes) / (8 * 192)
    assert bits == {"nvfp4": 4.5, "mxfp4": 4.25, "nf4": 4.5}[fmt.name]


def test_packing_puts_the_even_column_into_the_low_nibble() -> None:
    codes = torch.randint(0, 16, (3, 10), dtype=torch.uint8)
    packed = pack(codes)
    assert torch.equal(packed & 0xF, codes[:, 0::2])
    assert torch.equal(unpack(packed), codes)


@every_format
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_refused_by_name(fmt: Format, bad: float) -> None:
    weight = random_weight(2, 64)
    weight[1, 3] = bad
    with pytest.raises(ValueError, match="wk holds NaN"):
        quantize(weight, fmt, name="wk")


@every_format
def test_columns_that_do_not_divide_into_blocks_are_refused(fmt: Format) -> None:
    with pytest.raises(ValueError, match=f"multiple of {fmt.block}"):
        quantize(torch.ones(2, fmt.block + 8), fmt)


@every_format
def test_the_linear_equals_a_dense_one_in_forward_and_gradient(fmt: Format) -> None:
    packed = quantize(random_weight(24, 192), fmt)
    layer = frozen_linear(packed, torch.randn(24, dtype=torch.float64), fmt)
    layer.to(torch.bfloat16).bias = torch.randn(24, dtype=torch.float64)
    x = torch.randn(3, 192, dtype=torch.float64, requires_grad=True)
    dense = dequantize_reference(packed, fmt).double()
    torch.testing.assert_close(layer(x), F.linear(x, dense, layer.bias), rtol=0, atol=1e-12)
    dy = torch.randn(3, 24, dtype=torch.float64)
    (dx,) = torch.autograd.grad(layer(x), x, dy)
    torch.testing.assert_close(dx, dy @ dense, rtol=0, atol=1e-12)


@every_weight
@pytest.mark.usefixtures("_compressed_tensors_without_its_compiler")
def test_mxfp4_bits_and_values_equal_compressed_tensors(kind: str) -> None:
    weight = special_weights()[kind]
    blocks = weight.unflatten(1, (-1, 32))
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), MXFP4_ARGS)
    scheme = QuantizationScheme(targets=["Linear"], weights=MXFP4_ARGS)
    theirs = MXFP4PackedCompressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    packed = quantize(weight, MXFP4)
    assert torch.equal(packed.block_scale, theirs["weight_scale"])
    assert torch.equal(packed.codes, theirs["weight_packed"])
    decompressed = MXFP4PackedCompressor.decompress(theirs, scheme)["weight"]
    assert decompressed.dtype == torch.bfloat16
    assert torch.equal(MXFP4.dequantize(packed, torch.bfloat16), decompressed)


@every_weight
def test_nf4_bits_and_values_equal_bitsandbytes(kind: str) -> None:
    weight = special_weights()[kind]
    codes, state = bitsandbytes.functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    packed = quantize(weight, NF4)
    theirs = codes.view(packed.codes.shape)
    assert torch.equal(packed.codes, (theirs >> 4) | (theirs << 4))
    assert torch.equal(packed.block_scale.view(torch.float32).flatten(), state.absmax)
    assert torch.equal(NF4.dequantize(packed, torch.float32), bitsandbytes.functional.dequantize_4bit(codes, state))
