"""Laws of the importance weights that correct for the difference between trainer and sampler, and of the statistics of
this difference."""

import math
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qerl_pl.objective.correction import Level, Mode, Rejection, effective_share, importance_weights, mismatch
from tests.reference import correction as reference

MODES: tuple[Mode, ...] = get_args(Mode)
LEVELS: tuple[Level, ...] = get_args(Level)


@st.composite
def log_ratios(draw) -> tuple[Tensor, Tensor]:
    rows, tokens = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    values = draw(st.sampled_from([0.0, 0.1, 1.0])) * torch.randn(rows, tokens, generator=generator).double()
    return values, torch.rand(rows, tokens, generator=generator) < draw(st.sampled_from([0.0, 0.3, 0.8, 1.0]))


def valid_rows(values: Tensor, mask: Tensor) -> list[list[float]]:
    return [row[keep].tolist() for row, keep in zip(values, mask, strict=True)]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=30)
@given(case=log_ratios(), garbage=st.sampled_from([0.0, math.nan, math.inf, -math.inf, 1e30]))
def test_weights_equal_the_loops_whatever_padding_holds(mode, level, case, garbage):
    values, mask = case
    found = importance_weights(torch.where(mask, values, garbage), mask, mode=mode, level=level, low=0.5, high=1.5)
    expected, outside = reference.weights(valid_rows(values, mask), mode, level, 0.5, 1.5)
    for row, factors in zip(valid_rows(found.weights, mask), expected, strict=True):
        assert row == pytest.approx(factors, rel=1e-12)
    units = [factor for row in expected for factor in (row if level == "token" else row[:1])]
    assert int(found.num_outside) == outside
    assert int(found.num_units) == len(units)
    assert float(found.weight_sum) == pytest.approx(sum(units))
    assert float(found.square_sum) == pytest.approx(sum(unit**2 for unit in units))
    assert (found.weights[~mask] == 0).all()


@pytest.mark.parametrize("by", ["sequence", "geometric"])
@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=30)
@given(case=log_ratios())
def test_rows_are_rejected_beside_the_weights_of_their_tokens(by, mode, case):
    values, mask = case
    rejection = Rejection(by, low=0.8, high=1.3)
    found = importance_weights(values, mask, mode=mode, low=0.5, high=1.5, rejection=rejection)
    rows = valid_rows(values, mask)
    expected, outside = reference.weights(rows, mode, "token", 0.5, 1.5)
    gone = [reference.rejected(row, by, 0.8, 1.3) for row in rows]
    expected = [[0.0 if out else factor for factor in row] for row, out in zip(expected, gone, strict=True)]
    for row, factors in zip(valid_rows(found.weights, mask), expected, strict=True):
        assert row == pytest.approx(factors, rel=1e-12)
    assert int(found.num_outside) == outside
    assert (int(found.num_rows), int(found.num_rejected)) == (sum(map(bool, rows)), sum(gone))
    assert float(found.square_sum) == pytest.approx(sum(factor**2 for row in expected for factor in row))


@pytest.mark.parametrize("bounds", [(1.1, 2.0), (0.5, 0.9), (1.0, 1.0), (-0.1, 2.0), (math.nan, 2.0), (0.5, math.nan)])
def test_bounds_that_reject_equal_policies_are_refused(bounds):
    with pytest.raises(ValueError, match=r"model\.objective\.rejection"):
        Rejection("sequence", low=bounds[0], high=bounds[1])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=40)
@given(case=log_ratios())
def test_equal_policies_need_no_correction(mode, level, case):
    values, mask = case
    found = importance_weights(0 * values, mask, mode=mode, level=level, low=0.5, high=1.5)
    assert torch.equal(found.weights, mask.double())
    assert found.num_outside == 0
    assert effective_share(found.num_units, found.weight_sum, found.square_sum) == float(mask.any())


def test_importance_weights_are_constants():
    log_ratio = torch.zeros(2, 3, requires_grad=True)
    assert not importance_weights(log_ratio, torch.ones(2, 3) > 0, mode="truncate").weights.requires_grad


def test_untruncated_sequence_weights_are_unbiased():
    """For any function f of a completion, the mean of weight x f over the sampler's distribution equals the mean of f
    over the trainer's distribution. Both means are computed exactly, as sums over all completions of two tokens."""
    generator = torch.Generator().manual_seed(0)
    trainer, sampler = torch.rand(2, 4, generator=generator).double().log_softmax(dim=1)
    first, second = torch.cartesian_prod(torch.arange(4), torch.arange(4)).unbind(1)
    log_ratio = torch.stack([(trainer - sampler)[first], (trainer - sampler)[second]], dim=1)
    weights = importance_weights(
        log_ratio, torch.ones(16, 2) > 0, mode="truncate", level="sequence", high=math.inf
    ).weights[:, 0]
    function = torch.randn(16, generator=generator).double()
    estimate = ((sampler[first] + sampler[second]).exp() * weights * function).sum()
    torch.testing.assert_close(estimate, ((trainer[first] + trainer[second]).exp() * function).sum())


@pytest.mark.parametrize("log_ratio", [1e4, -1e4, math.inf, -math.inf])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", MODES)
def test_extreme_ratios_give_finite_weights(mode, level, log_ratio):
    log_ratios = torch.full((2, 3), log_ratio)
    found = importance_weights(log_ratios, torch.ones(2, 3) > 0, mode=mode, level=level, high=math.inf)
    assert found.weights.isfinite().all()


def test_the_effective_share_falls_to_one_over_n_and_is_zero_when_all_is_masked():
    one_of_four = torch.tensor([1.0, 0.0, 0.0, 0.0])
    assert effective_share(torch.tensor(4), one_of_four.sum(), one_of_four.square().sum()) == 0.25
    assert effective_share(torch.tensor(4), torch.tensor(0.0), torch.tensor(0.0)) == 0


@pytest.mark.parametrize("bounds", [(-0.1, 2.0), (1.1, 2.0), (0.5, 0.9), (math.nan, 2.0), (0.5, math.nan)])
def test_bounds_that_exclude_equal_policies_are_refused(bounds):
    with pytest.raises(ValueError, match="expected 0 <= low <= 1 <= high"):
        importance_weights(torch.zeros(1, 1), torch.ones(1, 1) > 0, mode="mask", low=bounds[0], high=bounds[1])


def test_bounds_that_mask_all_but_equal_policies_are_refused():
    with pytest.raises(ValueError, match="expected low < high"):
        importance_weights(torch.zeros(1, 1), torch.ones(1, 1) > 0, mode="mask", low=1.0, high=1.0)


@pytest.mark.parametrize("shape", [(6,), (3, 2)])
def test_shapes_are_checked(shape):
    with pytest.raises(ValueError, match=r"expected one \[B, S\]"):
        importance_weights(torch.zeros(shape), torch.ones(2, 3) > 0, mode="mask")


@settings(max_examples=50)
@given(case=log_ratios())
def test_mismatch_equals_the_loops(case):
    values, mask = case
    found = mismatch(values[mask])
    if mask.any():
        expected = reference.mismatch(values[mask].tolist())
        computed = {name: float(value) for name, value in found._asdict().items()}
        assert computed == pytest.approx(expected, rel=1e-12, abs=1e-15)
    else:
        assert found.count == 0
        assert all(value.isnan() for value in found[1:])


def test_the_percentile_is_that_of_a_known_sample():
    values = torch.arange(-100, 0).double()[torch.randperm(100, generator=torch.Generator().manual_seed(0))]
    found = mismatch(values / 1000)
    assert (float(found.p99), float(found.max)) == (0.099, 0.1)
