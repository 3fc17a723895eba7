"""Laws of the KL estimators and of the top-entropy threshold."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qerl_pl.objective.losses import entropy_threshold, kl_estimate, weighted_sum
from tests.reference import losses as reference

SEEDS = st.integers(0, 2**31)
DENSITIES = st.sampled_from([0.0, 0.3, 0.8, 1.0])


def draw_tokens(seed: int, density: float) -> tuple[Tensor, Tensor, Tensor]:
    """Draw reference log-probabilities in nats, positive values and a mask, all [B, S]."""
    generator = torch.Generator().manual_seed(seed)
    rows, tokens = torch.randint(1, 7, (2,), generator=generator).tolist()
    logprobs, values, mask = torch.rand(3, rows, tokens, generator=generator, dtype=torch.float64)
    return -3 * logprobs, 3 * values, mask < density


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@settings(max_examples=20)
@given(seed=SEEDS, density=DENSITIES)
def test_kl_estimates_and_their_gradients_equal_the_formulas(kind, seed, density):
    ref_logprobs, values, mask = draw_tokens(seed, density)
    policy = (-values).requires_grad_()
    estimate = kl_estimate(policy, ref_logprobs, mask, kind)
    (gradient,) = torch.autograd.grad(estimate.sum(), policy)
    for index in torch.cartesian_prod(*map(torch.arange, policy.shape)).tolist():
        token = policy[tuple(index)].detach().requires_grad_()
        expected = reference.kl(kind, token, ref_logprobs[tuple(index)]) * mask[tuple(index)]
        torch.testing.assert_close(estimate[tuple(index)], expected, rtol=1e-9, atol=1e-12)
        (expected_gradient,) = torch.autograd.grad(expected, token)
        torch.testing.assert_close(gradient[tuple(index)], expected_gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "value_is_kl", "gradient_of"), [("k1", True, None), ("k2", False, "p||q"), ("k3", True, "q||p")]
)
def test_kl_estimates_have_the_expectation_and_gradient_that_is_claimed(kind, value_is_kl, gradient_of):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, generator=generator, dtype=torch.float64, requires_grad=True)
    log_p = logits.log_softmax(0)
    log_q = torch.randn(9, generator=generator, dtype=torch.float64).log_softmax(0)
    forward, backward = (log_p.exp() * (log_p - log_q)).sum(), (log_q.exp() * (log_q - log_p)).sum()
    tokens = kl_estimate(log_p.unsqueeze(0), log_q.unsqueeze(0), torch.ones(1, 9, dtype=torch.bool), kind)[0]
    loss = (log_p.exp().detach() * tokens).sum()  # what sampling from p gives on average
    (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
    if value_is_kl:
        torch.testing.assert_close(loss, forward)
    target = {None: 0 * forward, "p||q": forward, "q||p": backward}[gradient_of]
    (expected,) = torch.autograd.grad(target, logits)
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("garbage", [math.inf, -math.inf, math.nan, 1e30])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_padding_never_reaches_the_kl_or_its_gradient(kind, garbage):
    policy = torch.tensor([[-1.0, garbage]], requires_grad=True)
    estimate = kl_estimate(policy, torch.tensor([[-2.0, garbage]]), torch.tensor([[True, False]]), kind)
    loss = weighted_sum(estimate, torch.tensor([[True, False]]), torch.ones(1))
    (gradient,) = torch.autograd.grad(loss, policy)
    assert loss.isfinite()
    assert estimate[0, 1] == gradient[0, 1] == 0


@settings(max_examples=30)
@given(seed=SEEDS, density=DENSITIES, share=st.floats(0.01, 1.0))
def test_the_entropy_threshold_keeps_the_top_share_of_the_valid_tokens(seed, density, share):
    _, values, mask = draw_tokens(seed, density)
    valid = sorted(values[mask].tolist(), reverse=True)
    kept = mask & (values >= entropy_threshold(values[mask], share))
    assert sorted(values[kept].tolist(), reverse=True) == valid[: math.ceil(share * len(valid))]


def test_ties_at_the_entropy_threshold_are_kept():
    entropy = torch.tensor([1.0, 0.5, 0.5, 0.5, 0.1])
    assert entropy_threshold(entropy, 0.4) == 0.5


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5, math.nan])
def test_a_share_out_of_range_is_refused(share):
    with pytest.raises(ValueError, match="share is"):
        entropy_threshold(torch.ones(3), share)
