"""The NVFP4 codec against its table-look-up definition and against compressed-tensors, bit for bit."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize as compressed_dequantize
from compressed_tensors.quantization.quant_scheme import NVFP4A16
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qerl_pl.quant import formats, nvfp4
from qerl_pl.quant.nvfp4 import BLOCK, E2M1, NVFP4Weight, dequantize, dequantize_reference, tensor_scale
from tests.packed import quantize_nvfp4

ARGS: QuantizationArgs = NVFP4A16["weights"]
SCHEME = QuantizationScheme(targets=["Linear"], weights=ARGS)
pytestmark = pytest.mark.usefixtures("_compressed_tensors_without_its_compiler")
SHAPES = [(1, 16), (3, 48), (5, 1040), (7, 160), (64, 256)]


def adversarial(kind: str, rows: int, cols: int) -> Tensor:
    noise = torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows * cols))
    blocks = noise.view(rows, -1, BLOCK)
    if kind == "outlier":
        blocks[..., 5] *= 1000
    elif kind == "ties":  # every midpoint of the grid, exactly, at scale 1 and a power of two
        values = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
        blocks[:] = torch.cat([values, -values]) * 2.0 ** torch.arange(-3, rows - 3).view(-1, 1, 1)
    elif kind == "zero blocks":
        blocks[:, ::2] = 0
    elif kind == "zero":
        blocks.zero_()
    elif kind == "negative zero":
        blocks.copy_(torch.where(noise.view_as(blocks) > 0, 0.0, -0.0))
    elif kind == "denormal":
        blocks *= 1e-40
    elif kind == "mixed with denormal":
        blocks[..., ::3] *= 1e-42
    elif kind == "tiny":
        blocks *= 1e-34
    elif kind == "huge":
        blocks *= 1e37
    return noise


KINDS = [
    "normal",
    "outlier",
    "ties",
    "zero blocks",
    "zero",
    "negative zero",
    "denormal",
    "mixed with denormal",
    "tiny",
    "huge",
]


def compressed_tensors_state(weight: Tensor, divisor: Tensor | None = None) -> dict[str, Tensor]:
    """What compressed-tensors writes for an fp32 weight: its packed weight, its scales and its divisor."""
    blocks = weight.unflatten(1, (-1, BLOCK))
    divisor = generate_gparam(weight.min(), weight.max()) if divisor is None else divisor
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), ARGS, global_scale=divisor)
    state = {"weight": weight, "weight_scale": scale, "weight_global_scale": divisor}
    return NVFP4PackedCompressor.compress(state, SCHEME)


def assert_same_bits(ours: NVFP4Weight, theirs: dict[str, Tensor]) -> None:
    assert torch.equal(nvfp4.scale_divisor(ours.global_scale).view(1), theirs["weight_global_scale"])
    assert torch.equal(ours.block_scale, theirs["weight_scale"].view(torch.uint8))
    assert torch.equal(ours.codes, theirs["weight_packed"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantised_bits_equal_compressed_tensors(shape: tuple[int, int], kind: str) -> None:
    weight = adversarial(kind, *shape)
    assert_same_bits(quantize_nvfp4(weight), compressed_tensors_state(weight))


@settings(max_examples=30)
@given(seed=st.integers(0, 2**31), exponent=st.integers(-30, 30), spread=st.floats(0, 4))
def test_quantised_bits_equal_compressed_tensors_for_random_magnitudes(seed: int, exponent: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    scales = 2.0**exponent * torch.exp(spread * torch.randn(4, 3, 1, generator=generator))
    weight = (torch.randn(4, 3, BLOCK, generator=generator) * scales).flatten(1)
    assert_same_bits(quantize_nvfp4(weight), compressed_tensors_state(weight))


def test_a_shared_scale_gives_the_bits_of_compressed_tensors_with_that_scale() -> None:
    small, large = adversarial("normal", 3, 48) / 9, adversarial("normal", 5, 48)
    shared = tensor_scale(large.abs().amax())
    theirs = compressed_tensors_state(small, generate_gparam(large.min(), large.max()))
    assert_same_bits(quantize_nvfp4(small, shared), theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_weights_are_upcast_first(dtype: torch.dtype) -> None:
    weight = adversarial("normal", 5, 64).to(dtype)
    assert_same_bits(quantize_nvfp4(weight), compressed_tensors_state(weight.float()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dequantised_weights_equal_compressed_tensors(shape: tuple[int, int], kind: str) -> None:
    state = compressed_tensors_state(adversarial(kind, *shape))
    weight = NVFP4Weight(
        state["weight_packed"], state["weight_scale"].view(torch.uint8), 1 / state["weight_global_scale"][0].double()
    )
    values = dequantize_reference(weight)
    unpacked = torch.stack([state["weight_packed"] & 0xF, state["weight_packed"] >> 4], -1).flatten(1).long()
    table = torch.tensor([*E2M1, *(-value for value in E2M1)])
    theirs = compressed_dequantize(
        x_q=table[unpacked],
        scale=state["weight_scale"].float(),
        global_scale=state["weight_global_scale"],
        dtype=torch.float32,
    )
    assert torch.equal(values, theirs)
    decompressed = NVFP4PackedCompressor.decompress(state, SCHEME)["weight"]  # bf16, but fp32 for a single block a row
    assert torch.equal(dequantize(weight, decompressed.dtype), decompressed)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**31))
def test_the_fp64_multiplier_reproduces_every_fp32_quotient_by_a_divisor(seed: int) -> None:
    divisors = torch.randint(0x20000000, 0x5F000000, (200,), generator=torch.Generator().manual_seed(seed))
    divisors = divisors.int().view(torch.float32)
    bits = torch.arange(0x7F, dtype=torch.uint8)  # every finite non-negative E4M3
    for divisor in divisors:
        expected = bits.view(torch.float8_e4m3fn).float() / divisor
        assert torch.equal(nvfp4.effective_scale(bits, 1 / divisor.double()), expected)
        assert torch.equal(nvfp4.scale_divisor(1 / divisor.double()), divisor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fast_dequantisation_equals_the_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (shape[0], shape[1] // 2), generator=generator).to(torch.uint8)
    scale = torch.randint(0, 0x7F, (shape[0], shape[1] // BLOCK), generator=generator).to(torch.uint8)
    for global_scale in (torch.tensor(0.01234), torch.tensor(1 / 3, dtype=torch.float64)):
        weight = NVFP4Weight(codes, scale, global_scale)
        assert torch.equal(dequantize(weight, dtype), dequantize_reference(weight).to(dtype))


def test_each_code_decodes_to_its_value_with_the_even_column_in_the_low_nibble() -> None:
    codes = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], dtype=torch.uint8)
    one = torch.tensor([[1.0]]).to(torch.float8_e4m3fn).view(torch.uint8)
    values = dequantize_reference(NVFP4Weight(codes, one, torch.tensor(1.0)))
    expected = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert values.tolist() == [expected + [-value for value in expected]]


def test_representable_weights_survive_a_round_trip() -> None:
    weight = quantize_nvfp4(adversarial("normal", 6, 64))
    again = quantize_nvfp4(dequantize_reference(weight), weight.global_scale)
    assert torch.equal(dequantize_reference(again), dequantize_reference(weight))


def test_the_error_of_a_weight_is_at_most_half_a_step_of_its_block() -> None:
    weight = adversarial("normal", 16, 256)
    packed = quantize_nvfp4(weight)
    step = 2 * nvfp4.effective_scale(packed.block_scale, packed.global_scale).repeat_interleave(BLOCK, 1)
    # Steps are 2 between 4 and 6; an E4M3 scale rounded down by up to 1/17 clips the block's largest weight a little.
    bound = torch.maximum(step / 2, weight.abs() / 17 * 1.01)
    assert ((dequantize_reference(packed) - weight).abs() <= bound).all()


def test_chunked_rows_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = adversarial("outlier", 7, 160)
    whole = quantize_nvfp4(weight)
    dense = dequantize(whole, torch.float32)
    monkeypatch.setattr(formats, "_CHUNK", 2 * 160 + 1)
    assert torch.equal(quantize_nvfp4(weight).codes, whole.codes)
    assert torch.equal(dequantize(whole, torch.float32), dense)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_not_finite_is_refused_by_name(bad: float) -> None:
    weight = torch.ones(2, 32)
    weight[1, 7] = bad
    with pytest.raises(ValueError, match=r"model\.layers\.3\.mlp\.up_proj\.weight holds NaN"):
        quantize_nvfp4(weight, name="model.layers.3.mlp.up_proj.weight")


@pytest.mark.parametrize("shape", [(2, 24), (16,), (0, 16), (2, 2, 16)], ids=str)
def test_a_shape_that_does_not_divide_into_blocks_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"wq has shape .*multiple of 16"):
        quantize_nvfp4(torch.ones(shape), name="wq")


def test_tables_are_real_even_when_first_used_under_the_meta_device() -> None:
    formats._pairs.cache_clear()
    nvfp4._midpoints.cache_clear()
    weight = torch.ones(1, 16)
    with torch.device("meta"):
        packed = quantize_nvfp4(weight)
        dense = dequantize(packed, torch.float32)
    assert torch.equal(dense, dequantize_reference(packed))
