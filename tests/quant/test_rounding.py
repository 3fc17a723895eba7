"""Quantisation to 4 bits: the search for scales, GPTQ and the packing of weights, compared with slow loops and measured
on a layer with outlier channels."""

from typing import get_args

import pytest
import torch
from torch import Tensor

from qerl_pl.model.quantization import Method
from qerl_pl.quant import formats
from qerl_pl.quant.formats import Format, PackedWeight, pack, quantize, round_codes
from qerl_pl.quant.mxfp4 import MXFP4
from qerl_pl.quant.nf4 import NF4
from qerl_pl.quant.nvfp4 import NVFP4
from qerl_pl.quant.rounding import (
    column_order,
    gptq_codes,
    output_error,
    pack_group,
    pack_groups,
    report_layer,
    rounding_limits,
    search_scales,
)
from tests.quant.conftest import layer_with_outliers
from tests.reference.dequantize import dequantize_reference

every_format = pytest.mark.parametrize("fmt", [NVFP4, MXFP4, NF4], ids=lambda fmt: fmt.name)


def block_errors(weight: Tensor, fmt: Format, scale: Tensor, global_scale: Tensor, importance: Tensor) -> Tensor:
    packed = PackedWeight(round_codes(weight, fmt, scale, global_scale), scale, global_scale)
    error = (dequantize_reference(packed, fmt) - weight).double().square() * importance
    return error.unflatten(1, (-1, fmt.block)).sum(-1)


@every_format
@pytest.mark.parametrize("weighted", [False, True])
def test_the_search_finds_the_best_of_the_nearby_scales_for_every_block(fmt, weighted):
    weight, moment = layer_with_outliers(6, 192)
    weight[0, :64] = 0
    start = quantize(weight, fmt)
    importance = moment.diagonal() if weighted else torch.ones(192)
    chosen = search_scales(weight, fmt, start.block_scale, start.global_scale, importance)
    errors = [
        block_errors(weight, fmt, bits, start.global_scale, importance) for bits in fmt.nearby_scales(start.block_scale)
    ]
    best = block_errors(weight, fmt, chosen, start.global_scale, importance)
    torch.testing.assert_close(best, torch.stack(errors).amin(0), rtol=1e-5, atol=0)
    assert (best < errors[0]).any()
    assert torch.equal(chosen[0, 0], start.block_scale[0, 0])  # a block of zeros: no scale is better


def gptq_reference(weight: Tensor, scale: Tensor, fmt: Format, moment: Tensor, damping: float) -> Tensor:
    """Quantise a weight by Optimal Brain Quantisation, of which GPTQ is a faster form: one column after the other, each
    time with a new inverse of the moments of the remaining columns. Returns codes [N, K] uint8."""
    weight, scale, moment = weight.double().clone(), scale.double(), moment.double().clone()
    diagonal = moment.diagonal().clone()
    moment += torch.diag(torch.where(diagonal > 0, damping * diagonal.mean(), diagonal.mean()))
    values = torch.tensor(fmt.values, dtype=torch.float64)
    left = diagonal.argsort(descending=True).tolist()
    codes = torch.zeros_like(weight, dtype=torch.uint8)
    while left:
        k = left[0]
        inverse = torch.linalg.inv(moment[left][:, left])
        distances = (weight[:, k : k + 1] - values * scale[:, k : k + 1]).abs()  # [N, 16]
        codes[:, k] = distances.argmin(1).to(torch.uint8)
        error = weight[:, k] - values[codes[:, k].int()] * scale[:, k]
        weight[:, left] -= torch.outer(error / inverse[0, 0], inverse[0])
        left = left[1:]
    return codes


@every_format
def test_gptq_equals_a_loop_that_inverts_anew_for_every_column(fmt):
    weight, moment = layer_with_outliers(8, 192)
    start = quantize(weight, fmt)
    scale = fmt.effective_scale(start.block_scale, start.global_scale).repeat_interleave(fmt.block, 1)
    expected = gptq_reference(weight, scale, fmt, moment, 0.01)
    codes = gptq_codes(weight, fmt, start.block_scale, start.global_scale, *column_order(moment))

    def rounded(codes: Tensor) -> Tensor:  # by value: zero has two codes in E2M1
        return dequantize_reference(PackedWeight(codes, start.block_scale, start.global_scale), fmt)

    assert torch.equal(rounded(codes), rounded(pack(expected)))


@every_format
def test_a_number_has_the_place_of_the_value_that_it_is_rounded_to(fmt):
    codes, limits = rounding_limits(fmt)
    next_to_limits = [limits, limits.nextafter(torch.tensor(9.0)), limits.nextafter(torch.tensor(-9.0))]
    others = torch.tensor([0.0, -0.0, 1e30, -1e30, torch.inf, -torch.inf])
    numbers = torch.cat([3 * torch.randn(10_000), *next_to_limits, others])
    assert torch.equal(codes[torch.bucketize(numbers, limits)], fmt.encode(numbers, torch.ones(())))
    assert torch.tensor(fmt.values)[codes.int()].diff().ge(0).all()


@every_format
def test_gptq_of_uncorrelated_inputs_rounds_to_nearest(fmt):
    weight, _ = layer_with_outliers(8, 192)
    start = quantize(weight, fmt)
    moment = torch.diag(torch.rand(192) + 0.1)
    assert torch.equal(
        gptq_codes(weight, fmt, start.block_scale, start.global_scale, *column_order(moment)), start.codes
    )


def test_gptq_of_inputs_that_were_all_zero_rounds_to_nearest():
    weight, _ = layer_with_outliers(4, 64)
    start = quantize(weight, NVFP4)
    codes = gptq_codes(weight, NVFP4, start.block_scale, start.global_scale, *column_order(torch.zeros(64, 64)))
    assert torch.equal(codes, start.codes)


@every_format
def test_gptq_halves_the_output_error_of_rounding_to_nearest(fmt):
    weight, moment = layer_with_outliers(128, 256)
    both = (pack_group({"w": weight}, fmt, method, moment)["w"] for method in get_args(Method))
    rtn, gptq = (output_error(weight, fmt.dequantize(packed, torch.float32), moment) for packed in both)
    assert gptq < 0.5 * rtn


def test_the_output_error_is_that_of_the_outputs():
    weight, inputs = torch.randn(5, 32), torch.randn(100, 32)
    rounded = weight + 0.1 * torch.randn(5, 32)
    expected = ((rounded - weight) @ inputs.T).square().sum(0).mean()
    assert output_error(weight, rounded.clone(), inputs.T @ inputs / 100) == pytest.approx(expected.item(), 1e-5)


@pytest.mark.parametrize("method", get_args(Method))
def test_a_group_shares_the_scale_of_its_largest_weight(method):
    small, moment = layer_with_outliers(8, 64)
    packed = pack_group({"q": small, "k": 3 * small}, NVFP4, method, moment)
    assert packed["q"].global_scale == packed["k"].global_scale == NVFP4.tensor_scale(3 * small.abs().max())


def test_an_all_zero_weight_is_reported_without_error():
    zero = torch.zeros(2, 32)
    report = report_layer("zero", zero, quantize(zero, NVFP4), NVFP4, torch.zeros(32, 32))
    assert (report.weight_error, report.max_error, report.outlier_ratio, report.output_error) == (0, 0, 0, 0)


@every_format
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_that_are_packed_together_have_the_bits_of_each_packed_alone(fmt, dtype, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    groups = [
        {f"{number}.{part}": torch.randn(rows, 128, generator=generator).to(dtype) / 2**number for part, rows in parts}
        for number, parts in enumerate(map(enumerate, [(5, 3), (5, 3), (2,), (1,), (7, 7)]))
    ]
    groups[2]["2.0"].zero_()
    expected = {name: packed for group in groups for name, packed in pack_group(group, fmt, "rtn", None).items()}
    monkeypatch.setattr(formats, "_CHUNK", 3 * 128)
    found = pack_groups(groups, fmt)
    assert list(found) == list(expected)
    for name, packed in expected.items():
        assert torch.equal(found[name].codes, packed.codes), name
        assert torch.equal(found[name].block_scale, packed.block_scale), name
        assert torch.equal(found[name].global_scale, packed.global_scale), name
