"""The kernels that dequantise 4-bit weights equal their definition in torch. They run on the GPU if there is one, else
in Triton's interpreter."""

import pytest
import torch
from torch import Tensor

from qerl_pl.quant import formats, mxfp4, nf4, nvfp4
from qerl_pl.quant.formats import PackedWeight
from tests.combinations import pairwise
from tests.reference.dequantize import dequantize_reference

KERNELS = "qerl_pl.kernels.dequantize"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(1, 16), (3, 48), (5, 1040), (2, 4096), (5, 4112)]  # less than a program, one whole one, a short last one
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
# Tensor scales: the reciprocal of a checkpoint's divisor, and scales with which some weights are denormal, overflow
# fp16, and overflow fp32.
GLOBAL_SCALES = [1 / 2688, 3.3e-38, 97.0, 1e37]


def draw(rows: int, cols: int, global_scale: float = 1 / 2688) -> PackedWeight:
    """Draw a weight with random codes and random finite scales."""
    generator = torch.Generator().manual_seed(rows * cols)
    codes = torch.randint(256, (rows, cols // 2), generator=generator, dtype=torch.uint8)
    scale = torch.randint(255, (rows, cols // 16), generator=generator, dtype=torch.uint8)
    scale[scale == 0x7F] = 0x7E  # the other of the two bytes that are NaN
    return PackedWeight(
        codes.to(DEVICE), scale.to(DEVICE), torch.tensor(global_scale, dtype=torch.float64, device=DEVICE)
    )


def once_rounded(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Round fp32 values to another dtype as the tested kernel does: to nearest, except that Triton's interpreter
    truncates when it converts to bf16."""
    if DEVICE == "cpu" and dtype == torch.bfloat16:
        return (exact.view(torch.int32) & -0x10000).view(torch.float32).bfloat16()
    return exact.to(dtype)


def same_bits(found: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors have the same dtype and the same values, signs of zeros included; NaN counts as equal
    to NaN."""
    nan = expected.isnan()
    signs = found.signbit() == expected.signbit()
    return bool(((found == expected) & signs | (found.isnan() & nan)).all()) and found.dtype == expected.dtype


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")  # numpy's, meant here
@pytest.mark.parametrize(("shape", "global_scale", "dtype"), pairwise(SHAPES, GLOBAL_SCALES, DTYPES), ids=str)
def test_nvfp4_equals_its_definition_bit_for_bit(kernels, shape, global_scale, dtype):
    if DEVICE == "cpu" and dtype == torch.bfloat16 and global_scale == GLOBAL_SCALES[1]:
        pytest.skip("Triton's interpreter gets denormals of bf16 wrong")
    rows, cols = shape
    weight = draw(rows, cols, global_scale)
    found = kernels.dequantize_nvfp4(weight.codes, weight.block_scale, weight.global_scale, dtype)
    assert same_bits(found, once_rounded(dequantize_reference(weight), dtype))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_code_under_every_scale_byte(kernels, dtype):
    codes = torch.arange(16, dtype=torch.uint8).repeat(256, 1)  # [256, 16]
    weight = PackedWeight(
        formats.pack(codes).to(DEVICE),
        torch.arange(256, dtype=torch.uint8, device=DEVICE).unsqueeze(1),
        torch.tensor(0.7, dtype=torch.float64, device=DEVICE),
    )
    found = kernels.dequantize_nvfp4(weight.codes, weight.block_scale, weight.global_scale, dtype)
    assert same_bits(found, once_rounded(dequantize_reference(weight), dtype))
    assert found.isnan().any(dim=1).sum() == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fmt", [nvfp4.NVFP4, mxfp4.MXFP4, nf4.NF4], ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("shape", [(1, 64), (3, 192), (5, 1088)], ids=str)
def test_the_table_kernel_equals_the_definition_of_every_format(kernels, shape, fmt, dtype):
    generator = torch.Generator().manual_seed(sum(shape))
    weight = formats.quantize(torch.randn(shape, generator=generator), fmt)
    codes, scale, global_scale = (t.to(DEVICE) for t in (weight.codes, weight.block_scale, weight.global_scale))
    values = torch.tensor(fmt.values, device=DEVICE)
    found = kernels.dequantize_table(codes, fmt.effective_scale(scale, global_scale), values, dtype)
    expected = dequantize_reference(PackedWeight(codes, scale, global_scale), fmt)
    assert same_bits(found, once_rounded(expected, dtype))


@pytest.mark.parametrize(("rows", "cols", "part"), [(7, 80, slice(3, 6)), (2049, 16, slice(1, 2049))], ids=str)
def test_rows_of_a_larger_matrix_are_taken_where_they_are(kernels, rows, cols, part):
    weight = draw(rows, cols)
    codes, block_scale = weight.codes[part], weight.block_scale[part]  # not aligned to 16 bytes
    found = kernels.dequantize_nvfp4(codes, block_scale, weight.global_scale, torch.float32)
    assert same_bits(found, dequantize_reference(weight)[part])


@pytest.mark.parametrize(("number", "rows", "cols"), [(3, 5, 48), (4, 2, 4096), (1, 3, 16)], ids=str)
def test_stacked_weights_have_a_tensor_scale_each(kernels, number, rows, cols):
    whole = draw(number * rows, cols)
    scales = torch.tensor([1e-3 * 3**index for index in range(number)], dtype=torch.float64, device=DEVICE)
    parts = zip(whole.codes.split(rows), whole.block_scale.split(rows), scales, strict=True)
    expected = torch.cat([dequantize_reference(PackedWeight(*part)) for part in parts])
    assert same_bits(kernels.dequantize_nvfp4(whole.codes, whole.block_scale, scales, torch.float32), expected)
    stacked = PackedWeight(whole.codes, whole.block_scale, scales)
    assert same_bits(nvfp4.dequantize(stacked, torch.float32), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", [nvfp4.NVFP4, mxfp4.MXFP4, nf4.NF4], ids=lambda fmt: fmt.name)
def test_formats_on_the_gpu_equal_their_definition(fmt):
    weight = formats.quantize(torch.randn(96, 1024, device="cuda"), fmt)
    expected = dequantize_reference(weight, fmt)
    for dtype in DTYPES:
        assert same_bits(fmt.dequantize(weight, dtype), expected.to(dtype))


@pytest.mark.gpu
def test_a_matrix_of_more_than_two_to_the_31_weights():
    rows, cols = 2**17 + 1, 2**14
    codes = torch.randint(256, (rows, cols // 2), dtype=torch.uint8, device="cuda")
    scale = torch.randint(1, 0x7F, (rows, cols // 16), dtype=torch.uint8, device="cuda")
    weight = PackedWeight(codes, scale, torch.tensor(1e-3, dtype=torch.float64, device="cuda"))
    found = nvfp4.dequantize(weight, torch.bfloat16)
    last = PackedWeight(codes[-2:], scale[-2:], weight.global_scale)
    assert same_bits(found[-2:], dequantize_reference(last).bfloat16())
