"""Laws that hold for every 4-bit format, and the equality, bit for bit, of each format with the library that defines
it."""

import bitsandbytes.functional
import pytest
import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize as compressed_dequantize
from compressed_tensors.quantization.quant_scheme import MXFP4A16, NVFP4A16
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qerl_pl.quant import formats, nf4, nvfp4
from qerl_pl.quant.formats import PackedWeight, pack, quantize, round_codes
from qerl_pl.quant.mxfp4 import MXFP4
from qerl_pl.quant.nf4 import NF4
from qerl_pl.quant.nvfp4 import BLOCK, E2M1_CODES, NVFP4
from tests.reference.dequantize import dequantize_reference, unpack

pytestmark = pytest.mark.usefixtures("_compressed_tensors_without_its_compiler")
every_format = pytest.mark.parametrize("fmt", [NVFP4, MXFP4, NF4], ids=lambda fmt: fmt.name)


def random_weight(rows: int, cols: int, *, spread: float = 0.0, exponent: int = 0, seed: int = 0) -> Tensor:
    """Draw a weight whose blocks of 32 have different magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    scale = 2.0**exponent * torch.exp(spread * torch.randn(rows, cols // 32, 1, generator=generator))
    return (torch.randn(rows, cols // 32, 32, generator=generator) * scale).flatten(1)


def special_weights() -> dict[str, Tensor]:
    weight = random_weight(4, 192)
    zero_block, outlier, mixed = weight.clone(), weight.clone(), weight.clone()
    zero_block[1, :64] = 0
    outlier[:, 7::32] *= 1000
    mixed[:, ::3] *= 1e-42
    exponents = torch.arange(-60, 60).view(-1, 1)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(24) * 2.0**exponents
    boundary = torch.tensor([1.75, 1.7499999, 3.5, 3.4999998, 1.0, 6.0, 7.0, 0.1]).repeat(24).view(1, -1)
    return {
        "normal": weight,
        "spread": random_weight(6, 192, spread=4.0),
        "odd rows": random_weight(5, 1088),
        "zero block": zero_block,
        "zero": torch.zeros(2, 192),
        "negative zero": torch.where(weight > 0, 0.0, -0.0),
        "outlier": outlier,
        "ties": torch.cat([ties, -ties]),
        "boundary": torch.cat([boundary, -boundary]),
        "denormal": weight * 1e-40,
        "mixed with denormal": mixed,
        "small": weight * 1e-36,
        "large": weight * 1e36,
    }


every_weight = pytest.mark.parametrize("kind", special_weights())


@every_format
@every_weight
def test_fast_dequantisation_equals_the_reference(fmt, kind):
    packed = quantize(special_weights()[kind], fmt)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        assert torch.equal(fmt.dequantize(packed, dtype), dequantize_reference(packed, fmt).to(dtype))


@every_format
@every_weight
def test_each_weight_takes_the_nearest_value_of_its_block(fmt, kind):
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
def test_quantising_again_under_the_same_scales_changes_nothing(fmt):
    packed = quantize(random_weight(5, 192), fmt)
    dense = dequantize_reference(packed, fmt)
    codes = round_codes(dense, fmt, packed.block_scale, packed.global_scale)
    assert torch.equal(dequantize_reference(PackedWeight(codes, packed.block_scale, packed.global_scale), fmt), dense)


@every_format
def test_the_first_of_the_nearby_scales_are_the_scales_themselves_and_all_decode(fmt):
    packed = quantize(random_weight(3, 192, spread=2.0), fmt)
    nearby = list(fmt.nearby_scales(packed.block_scale))
    assert torch.equal(nearby[0], packed.block_scale)
    assert all(bits.dtype == fmt.scale_dtype for bits in nearby)
    decoded = torch.stack([fmt.effective_scale(bits, packed.global_scale) for bits in nearby])
    assert decoded.isfinite().all()
    assert (decoded > 0).all()
    assert (decoded.amin(0) < 0.65 * decoded[0]).all()


@every_format
def test_bits_a_weight(fmt):
    packed = quantize(random_weight(8, 192), fmt)
    bits = 8 * (packed.codes.nbytes + packed.block_scale.nbytes) / (8 * 192)
    assert bits == {"nvfp4": 4.5, "mxfp4": 4.25, "nf4": 4.5}[fmt.name]


def test_packing_puts_the_even_column_into_the_low_nibble():
    codes = torch.randint(0, 16, (3, 10), dtype=torch.uint8)
    packed = pack(codes)
    assert torch.equal(packed & 0xF, codes[:, 0::2])
    assert torch.equal(unpack(packed), codes)


@every_format
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_not_finite_is_refused_by_name(fmt, bad):
    weight = random_weight(2, 64)
    weight[1, 3] = bad
    with pytest.raises(ValueError, match="wk holds NaN"):
        quantize(weight, fmt, name="wk")


@every_format
def test_a_shape_that_does_not_divide_into_blocks_is_refused(fmt):
    for shape in ((2, fmt.block + 8), (fmt.block,), (0, fmt.block), (2, 2, fmt.block)):
        with pytest.raises(ValueError, match=f"wq has shape .*multiple of {fmt.block}"):
            quantize(torch.ones(shape), fmt, name="wq")


@every_format
def test_chunked_rows_do_not_change_the_result(fmt, monkeypatch):
    whole = quantize(random_weight(7, 192), fmt)
    dense = fmt.dequantize(whole, torch.float32)
    monkeypatch.setattr(formats, "_CHUNK", 2 * 192 + 1)
    assert torch.equal(quantize(random_weight(7, 192), fmt).codes, whole.codes)
    assert torch.equal(fmt.dequantize(whole, torch.float32), dense)


def test_tables_are_real_even_when_first_used_under_the_meta_device():
    formats._pairs.cache_clear()
    nvfp4._midpoints.cache_clear()
    weight = torch.ones(1, 16)
    with torch.device("meta"):
        packed = quantize(weight, NVFP4)
        dense = NVFP4.dequantize(packed, torch.float32)
    assert torch.equal(dense, dequantize_reference(packed, NVFP4))


@every_format
def test_tables_are_in_fp32_even_when_first_used_under_another_default_dtype(fmt):
    """While vLLM loads a model in bf16, this is torch's default dtype, and the trainer may not have used them yet."""
    weight = random_weight(4, 128)
    packed = quantize(weight, fmt)
    expected = dequantize_reference(packed, fmt)
    for table in (formats._table, formats._pairs, nvfp4._midpoints, nf4._midpoints):
        table.cache_clear()
    torch.set_default_dtype(torch.bfloat16)
    try:
        again = quantize(weight, fmt)
        dense = fmt.dequantize(packed, torch.float32)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(again.codes, packed.codes)
    assert torch.equal(dense, expected)


# ---- the libraries that define the formats ---------------------------------------------------------------------------


def compressed(weight: Tensor, args: QuantizationArgs, divisor: Tensor | None = None) -> dict[str, Tensor]:
    """Compress an fp32 weight with compressed-tensors: to NVFP4 if ``divisor``, the reciprocal of the tensor scale, is
    given, otherwise to MXFP4."""
    blocks = weight.unflatten(1, (-1, args.group_size or 0))
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args, global_scale=divisor)
    state = {"weight": weight, "weight_scale": scale, **({} if divisor is None else {"weight_global_scale": divisor})}
    compressor = MXFP4PackedCompressor if divisor is None else NVFP4PackedCompressor
    return compressor.compress(state, QuantizationScheme(targets=["Linear"], weights=args))


def nvfp4_state(weight: Tensor) -> dict[str, Tensor]:
    return compressed(weight, NVFP4A16["weights"], generate_gparam(weight.min(), weight.max()))


def assert_same_bits(ours: PackedWeight, theirs: dict[str, Tensor]) -> None:
    assert torch.equal(nvfp4.scale_divisor(ours.global_scale).view(1), theirs["weight_global_scale"])
    assert torch.equal(ours.block_scale, theirs["weight_scale"].view(torch.uint8))
    assert torch.equal(ours.codes, theirs["weight_packed"])


@every_weight
def test_nvfp4_bits_and_values_equal_compressed_tensors(kind):
    weight = special_weights()[kind]
    theirs = nvfp4_state(weight)
    packed = quantize(weight, NVFP4)
    assert_same_bits(packed, theirs)
    args = QuantizationScheme(targets=["Linear"], weights=NVFP4A16["weights"])
    decompressed = NVFP4PackedCompressor.decompress(theirs, args)["weight"]
    assert torch.equal(NVFP4.dequantize(packed, decompressed.dtype), decompressed)
    exact = compressed_dequantize(
        x_q=torch.tensor(E2M1_CODES)[unpack(packed.codes).long()],
        scale=theirs["weight_scale"].float(),
        global_scale=theirs["weight_global_scale"],
        dtype=torch.float32,
    )
    assert torch.equal(NVFP4.dequantize(packed, torch.float32), exact)


@settings(max_examples=30)
@given(seed=st.integers(0, 2**31), exponent=st.integers(-30, 30), spread=st.floats(0, 4))
def test_nvfp4_bits_equal_compressed_tensors_for_random_magnitudes(seed: int, exponent: int, spread: float):
    weight = random_weight(4, 64, spread=spread, exponent=exponent, seed=seed)
    assert_same_bits(quantize(weight, NVFP4), nvfp4_state(weight))


def test_a_shared_scale_gives_the_bits_of_compressed_tensors_with_that_scale():
    small, large = random_weight(3, 64, exponent=-3), random_weight(5, 64, seed=1)
    shared = NVFP4.tensor_scale(large.abs().amax())
    theirs = compressed(small, NVFP4A16["weights"], generate_gparam(large.min(), large.max()))
    assert_same_bits(quantize(small, NVFP4, shared), theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_upcast_first(dtype):
    weight = random_weight(5, 64).to(dtype)
    assert_same_bits(quantize(weight, NVFP4), nvfp4_state(weight.float()))


@settings(max_examples=20)
@given(seed=st.integers(0, 2**31))
def test_the_fp64_multiplier_reproduces_every_fp32_quotient_by_a_divisor(seed: int):
    divisors = torch.randint(0x20000000, 0x5F000000, (200,), generator=torch.Generator().manual_seed(seed))
    divisors = divisors.int().view(torch.float32)
    bits = torch.arange(0x7F, dtype=torch.uint8)  # every finite non-negative E4M3
    for divisor in divisors:
        expected = bits.view(torch.float8_e4m3fn).float() / divisor
        assert torch.equal(nvfp4.effective_scale(bits, 1 / divisor.double()), expected)
        assert torch.equal(nvfp4.scale_divisor(1 / divisor.double()), divisor)


@pytest.mark.parametrize("global_scale", [torch.tensor(0.01234), torch.tensor(1 / 3, dtype=torch.float64)])
def test_every_code_under_every_scale_of_nvfp4_has_its_value(global_scale):
    scales = torch.arange(0x7F, dtype=torch.uint8).view(-1, 1)
    packed = PackedWeight(pack(torch.arange(BLOCK, dtype=torch.uint8).expand(0x7F, -1)), scales, global_scale)
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    expected = torch.tensor(values + [-value for value in values])
    expected = expected * (scales.view(torch.float8_e4m3fn).double() * global_scale).float()
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        assert torch.equal(NVFP4.dequantize(packed, dtype), expected.to(dtype))


@every_weight
def test_mxfp4_bits_and_values_equal_compressed_tensors(kind):
    weight = special_weights()[kind]
    theirs = compressed(weight, MXFP4A16["weights"])
    packed = quantize(weight, MXFP4)
    assert torch.equal(packed.block_scale, theirs["weight_scale"])
    assert torch.equal(packed.codes, theirs["weight_packed"])
    scheme = QuantizationScheme(targets=["Linear"], weights=MXFP4A16["weights"])
    decompressed = MXFP4PackedCompressor.decompress(theirs, scheme)["weight"]
    assert decompressed.dtype == torch.bfloat16
    assert torch.equal(MXFP4.dequantize(packed, torch.bfloat16), decompressed)


@every_weight
def test_nf4_bits_and_values_equal_bitsandbytes(kind):
    weight = special_weights()[kind]
    codes, state = bitsandbytes.functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    packed = quantize(weight, NF4)
    theirs = codes.view(packed.codes.shape)
    assert torch.equal(packed.codes, (theirs >> 4) | (theirs << 4))
    assert torch.equal(packed.block_scale.view(torch.float32).flatten(), state.absmax)
    assert torch.equal(NF4.dequantize(packed, torch.float32), bitsandbytes.functional.dequantize_4bit(codes, state))
