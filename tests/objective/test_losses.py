"""Laws of the policy losses and their reductions."""

import math
from functools import partial
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qerl_pl.objective.losses import (
    Aggregation,
    PolicyLoss,
    cispo_policy_loss,
    clipped_policy_loss,
    count_divisor,
    row_weights,
    sequence_policy_loss,
)
from tests.reference import losses as reference

MAX_TOKENS = 11
AGGREGATIONS: tuple[Aggregation, ...] = ("token", "sequence", "constant")
BOUNDS = {"clip_low": 0.2, "clip_high": 0.28}
LOSSES = {
    "clipped": (partial(clipped_policy_loss, **BOUNDS), reference.clipped(**BOUNDS)),
    "two-sided": (partial(clipped_policy_loss, **BOUNDS, max_ratio=1.5), reference.clipped(**BOUNDS, max_ratio=1.5)),
    "sequence": (
        partial(sequence_policy_loss, clip_low=0.05, clip_high=0.1),
        reference.sequence_clipped(clip_low=0.05, clip_high=0.1),
    ),
    "cispo": (partial(cispo_policy_loss, **BOUNDS), reference.cispo(**BOUNDS)),
    "cispo without lower bound": (partial(cispo_policy_loss, clip_high=0.5), reference.cispo(math.inf, 0.5)),
}
MEANS = {
    "token": reference.token_mean,
    "sequence": reference.sequence_mean,
    "constant": reference.constant_mean(MAX_TOKENS),
}


class Batch(NamedTuple):
    new: Tensor
    old: Tensor
    advantages: Tensor
    mask: Tensor
    importance: Tensor


@st.composite
def batches(draw, dtype: torch.dtype = torch.float64) -> Batch:
    """Draw batches whose ratios pi / pi_old lie between about 1/3 and 3, so that both clipping bounds have an effect.
    The mask may leave rows, or the whole batch, without a token."""
    rows, tokens = draw(st.integers(1, 5)), draw(st.integers(1, 7))
    density = draw(st.sampled_from([0.0, 0.3, 0.8, 1.0]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    new = -3 * torch.rand(rows, tokens, generator=generator, dtype=dtype)
    return Batch(
        new=new,
        old=new + 0.4 * torch.randn(rows, tokens, generator=generator, dtype=dtype),
        advantages=torch.randn(rows, generator=generator, dtype=dtype) * draw(st.sampled_from([0.0, 1.0])),
        mask=torch.rand(rows, tokens, generator=generator) < density,
        importance=2 * torch.rand(rows, tokens, generator=generator, dtype=dtype),
    )


def weights_of(mask: Tensor, aggregation: Aggregation) -> Tensor:
    return row_weights(mask, aggregation, count_divisor(mask, aggregation, max_tokens=MAX_TOKENS))


def with_gradient(loss, batch: Batch, weights: Tensor) -> tuple[PolicyLoss, Tensor]:
    new = batch.new.detach().requires_grad_()
    result = loss(new, batch.old, batch.advantages, batch.mask, weights, importance=batch.importance)
    (gradient,) = torch.autograd.grad(result.loss, new)
    return result._replace(loss=result.loss.detach()), gradient


def reference_with_gradient(objective, mean, batch: Batch) -> tuple[Tensor, Tensor]:
    new = batch.new.detach().requires_grad_()
    rows = []
    for b in range(len(new)):
        kept = [t for t in range(new.shape[1]) if batch.mask[b, t]]
        rows.append(
            objective(
                [new[b, t] for t in kept],
                [batch.old[b, t] for t in kept],
                float(batch.advantages[b]),
                [batch.importance[b, t] for t in kept],
            )
        )
    loss = -mean(rows) + 0 * new.sum()  # connected even where no token is valid
    (gradient,) = torch.autograd.grad(loss, new)
    return loss, gradient


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=25)
@given(batch=batches())
def test_loss_and_gradient_equal_the_loops(name, aggregation, batch):
    loss, objective = LOSSES[name]
    result, gradient = with_gradient(loss, batch, weights_of(batch.mask, aggregation))
    expected, expected_gradient = reference_with_gradient(objective, MEANS[aggregation], batch)
    torch.testing.assert_close(result.loss, expected, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=10)
@given(batch=batches(), size=st.integers(1, 5))
def test_micro_batches_add_up_to_the_batch(name, aggregation, batch, size):
    loss, _ = LOSSES[name]
    parts = [Batch(*part) for part in zip(*(field.split(size) for field in batch), strict=True)]
    divisor = torch.stack([count_divisor(part.mask, aggregation, max_tokens=MAX_TOKENS) for part in parts]).sum()
    whole, gradient = with_gradient(loss, batch, weights_of(batch.mask, aggregation))
    results, gradients = zip(
        *(with_gradient(loss, part, row_weights(part.mask, aggregation, divisor)) for part in parts), strict=True
    )
    assert torch.equal(torch.cat(gradients), gradient)
    for summed, expected in zip((torch.stack(field).sum() for field in zip(*results, strict=True)), whole, strict=True):
        torch.testing.assert_close(summed, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("garbage", [math.inf, -math.inf, math.nan, 1e30])
@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=10)
@given(batch=batches(torch.float32))
def test_padding_values_never_reach_loss_or_gradient(name, garbage, batch):
    loss, _ = LOSSES[name]
    weights = weights_of(batch.mask, "token")
    clean, clean_gradient = with_gradient(loss, batch, weights)
    mask = batch.mask
    dirty = Batch(
        new=torch.where(mask, batch.new, garbage),
        old=torch.where(mask, batch.old, garbage),
        advantages=torch.where(mask.any(1), batch.advantages, garbage),
        mask=mask,
        importance=torch.where(mask, batch.importance, garbage),
    )
    result, gradient = with_gradient(loss, dirty, weights)
    assert torch.equal(gradient, clean_gradient)
    assert all(torch.equal(a, b) for a, b in zip(result, clean, strict=True))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("shape", [(3, 4), (0, 4), (3, 0)])
@pytest.mark.parametrize("name", LOSSES)
def test_without_valid_tokens_the_loss_is_a_zero_with_a_gradient(name, shape, aggregation):
    empty = Batch(
        torch.zeros(shape), torch.zeros(shape), torch.ones(shape[0]), torch.zeros(shape) > 0, torch.ones(shape)
    )
    result, gradient = with_gradient(LOSSES[name][0], empty, weights_of(empty.mask, aggregation))
    assert torch.equal(gradient, torch.zeros(shape))
    assert [float(value) for value in result] == [0.0] * 6


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", ["clipped", "two-sided", "cispo"])
@settings(max_examples=10)
@given(batch=batches())
def test_on_policy_the_gradient_is_reinforce(name, aggregation, batch):
    batch = batch._replace(old=batch.new, importance=torch.ones_like(batch.new))
    weights = weights_of(batch.mask, aggregation)
    result, gradient = with_gradient(LOSSES[name][0], batch, weights)
    torch.testing.assert_close(gradient, -(weights * batch.advantages).unsqueeze(1) * batch.mask)
    assert result.clipped_low == result.clipped_high == result.k1 == result.k3 == 0
    assert result.ratio == batch.mask.sum()


def one_token(loss, ratio: float, advantage: float) -> tuple[PolicyLoss, float]:
    batch = Batch(
        new=torch.tensor([[math.log(ratio)]], dtype=torch.float64),
        old=torch.zeros(1, 1, dtype=torch.float64),
        advantages=torch.tensor([advantage], dtype=torch.float64),
        mask=torch.ones(1, 1, dtype=torch.bool),
        importance=torch.ones(1, 1, dtype=torch.float64),
    )
    result, gradient = with_gradient(loss, batch, torch.ones(1, dtype=torch.float64))
    return result, float(gradient)


@pytest.mark.parametrize(
    ("names", "ratio", "advantage", "weight", "clipped"),
    [
        (("clipped", "sequence"), 1.3, 1.0, 0, (0, 1)),  # raised enough: the upper bound stops it
        (("clipped", "sequence"), 1.04, 1.0, 1.04, (0, 0)),
        (("clipped", "sequence"), 0.5, 1.0, 0.5, (0, 0)),  # lowered although good: free to come back
        (("clipped", "sequence"), 0.7, -1.0, 0, (1, 0)),  # lowered enough: the lower bound stops it
        (("clipped", "sequence"), 3.0, -1.0, 3.0, (0, 0)),  # raised although bad: free to come back
        (("clipped", "sequence"), 3.0, 0.0, 3.0, (0, 0)),
        (("two-sided",), 1.6, -1.0, 0, (0, 1)),
        (("two-sided",), 1.4, -1.0, 1.4, (0, 0)),
        (("cispo",), 2.0, -1.0, 1.28, (0, 1)),  # limits the weight, and never drops the gradient
        (("cispo",), 1.1, 1.0, 1.1, (0, 0)),
        (("cispo",), 0.5, -1.0, 0.8, (1, 0)),
    ],
)
def test_each_clip_bound_acts_on_its_side_only(names, ratio, advantage, weight, clipped):
    for name in names:
        result, gradient = one_token(LOSSES[name][0], ratio, advantage)
        assert gradient == pytest.approx(-weight * advantage)
        assert (int(result.clipped_low), int(result.clipped_high)) == clipped


def test_the_sequence_ratio_is_the_geometric_mean_of_the_token_ratios():
    new = torch.tensor([[math.log(2.0), math.log(0.5), 0.0]], dtype=torch.float64)  # product 1: nothing to clip
    args = torch.zeros(1, 3).double(), torch.ones(1).double(), torch.ones(1, 3) > 0, torch.ones(1).double()
    result = sequence_policy_loss(new, *args)
    assert float(result.ratio) == pytest.approx(3)
    assert result.clipped_high == 0
    assert clipped_policy_loss(new, *args).clipped_high == 1


@pytest.mark.parametrize("log_ratio", [-1e4, -100.0, 100.0, 1e4])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("name", LOSSES)
def test_extreme_ratios_give_finite_losses_and_gradients(name, advantage, log_ratio):
    one = torch.ones(1, 1)
    batch = Batch(one * log_ratio, one * 0, torch.tensor([advantage]), one > 0, one)
    result, gradient = with_gradient(LOSSES[name][0], batch, torch.ones(1))
    assert all(value.isfinite() for value in result)
    assert gradient.isfinite().all()


def test_the_statistics_are_sums_over_valid_tokens():
    new = torch.tensor([[0.3, -0.2, 9.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False]])
    result = clipped_policy_loss(new, torch.zeros_like(new), torch.ones(1), mask, torch.ones(1))
    assert float(result.ratio) == pytest.approx(math.exp(0.3) + math.exp(-0.2))
    assert float(result.k1) == pytest.approx(-0.1)
    assert float(result.k3) == pytest.approx(math.exp(0.3) + math.exp(-0.2) - 2 - 0.1)


GOOD = {
    "logprobs": torch.zeros(2, 3),
    "old_logprobs": torch.zeros(2, 3),
    "advantages": torch.zeros(2),
    "mask": torch.ones(2, 3, dtype=torch.bool),
    "weights": torch.ones(2),
}


@pytest.mark.parametrize("loss", [clipped_policy_loss, sequence_policy_loss, cispo_policy_loss])
@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"logprobs": torch.zeros(6)}, "logprobs has shape"),
        ({"old_logprobs": torch.zeros(2, 1)}, "old_logprobs has shape"),
        ({"advantages": torch.zeros(2, 3)}, "advantages has shape"),
        ({"mask": torch.ones(2, 3)}, "expected torch.bool"),
        ({"mask": torch.ones(3, 2, dtype=torch.bool)}, "mask has shape"),
        ({"weights": torch.ones(())}, "weights has shape"),
        ({"importance": torch.ones(2)}, "importance has shape"),
        ({"clip_low": -0.1}, "clip_low is -0.1"),
        ({"clip_high": math.nan}, "clip_high is nan"),
        ({"clip_high": 0.28, "max_ratio": 1.2}, "max_ratio is 1.2"),
    ],
)
def test_bad_arguments_are_named(loss, bad, named):
    with pytest.raises(ValueError, match=named):
        loss(**{**GOOD, **bad})
