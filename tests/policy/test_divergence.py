"""The divergence between the distributions of student and teacher, and its gradient, equal a reference in fp64 that is
written with loops."""

import math

import pytest
import torch
from torch import Tensor

from qerl_pl.policy.divergence import divergence
from qerl_pl.policy.logprobs import Head

TOKENS, WIDTH, OTHER_WIDTH, VOCABULARY = 7, 12, 20, 33
BETAS = [0.0, 1e-3, 0.1, 0.5, 0.9, 1.0]


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def written_as_loops(p: Tensor, q: Tensor, beta: float) -> Tensor:
    """Compute equation 1 of the GKD paper token by token."""
    total = torch.zeros((), dtype=p.dtype)
    for a, b in zip(p, q, strict=True):
        mixture = beta * b + (1 - beta) * a
        if beta == 0:
            total = total + b * torch.log(b / a)
        elif beta == 1:
            total = total + a * torch.log(a / b)
        else:
            total = total + beta * b * torch.log(b / mixture) + (1 - beta) * a * torch.log(a / mixture)
    return total


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("cap", [None, 3.0])
def test_value_and_gradient_are_those_of_the_loops(beta, cap):
    hidden = normal(TOKENS, WIDTH, seed=0).requires_grad_()
    teacher_hidden = normal(TOKENS, OTHER_WIDTH, seed=1)
    head = Head(normal(VOCABULARY, WIDTH, seed=2), 0.7, cap)
    teacher = Head(normal(VOCABULARY, OTHER_WIDTH, seed=3), 1.3)
    weights = normal(TOKENS, seed=4)

    def logits(states: Tensor, of: Head) -> Tensor:
        values = states @ of.weight.t()
        return (values if of.logit_cap is None else of.logit_cap * torch.tanh(values / of.logit_cap)) / of.temperature

    p, q = logits(hidden, head).softmax(1), logits(teacher_hidden, teacher).softmax(1)
    expected = torch.stack([written_as_loops(p[row], q[row], beta) for row in range(TOKENS)])
    [gradient] = torch.autograd.grad((weights * expected).sum(), hidden)
    for chunk_bytes in (1, 4 * VOCABULARY * 3, 2**20):
        found = divergence(hidden, head, teacher_hidden, teacher, beta=beta, chunk_bytes=chunk_bytes)
        torch.testing.assert_close(found.value, expected.detach(), rtol=1e-10, atol=1e-12)
        assert torch.equal(found.agrees, p.argmax(1) == q.argmax(1))
        torch.testing.assert_close(
            torch.autograd.grad((weights * found.value).sum(), hidden)[0], gradient, rtol=1e-8, atol=1e-11
        )


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_student_that_is_its_teacher_has_no_divergence_and_no_gradient(beta, dtype):
    hidden = normal(TOKENS, WIDTH, seed=0, dtype=dtype).requires_grad_()
    head = Head(normal(VOCABULARY, WIDTH, seed=2, dtype=dtype), 1.0)
    found = divergence(hidden, head, hidden.detach(), head, beta=beta)
    assert found.value.abs().max() < 1e-6
    assert found.agrees.all()
    found.value.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.abs().max() < 1e-5


@pytest.mark.parametrize("beta", BETAS)
def test_the_divergence_is_positive_and_bounded_between_the_limits(beta):
    hidden, other = normal(64, WIDTH, seed=5), normal(64, WIDTH, seed=6)
    head = Head(normal(VOCABULARY, WIDTH, seed=2), 1.0)
    value = divergence(hidden, head, other, head, beta=beta).value
    assert (value > 0).all()
    if 0 < beta < 1:  # the entropy of the coin that chooses teacher or student
        assert (value <= -beta * math.log(beta) - (1 - beta) * math.log(1 - beta)).all()


def test_a_small_beta_divided_by_itself_is_the_forward_divergence():
    hidden, other = normal(TOKENS, WIDTH, seed=5), normal(TOKENS, WIDTH, seed=6)
    head = Head(normal(VOCABULARY, WIDTH, seed=2) / 4, 1.0)
    forward = divergence(hidden, head, other, head, beta=0.0).value
    torch.testing.assert_close(
        divergence(hidden, head, other, head, beta=1e-6).value / 1e-6, forward, rtol=1e-4, atol=0
    )


def test_swapping_the_models_swaps_the_two_limits():
    hidden, other = normal(TOKENS, WIDTH, seed=5), normal(TOKENS, WIDTH, seed=6)
    head = Head(normal(VOCABULARY, WIDTH, seed=2), 1.0)
    torch.testing.assert_close(
        divergence(hidden, head, other, head, beta=1.0).value, divergence(other, head, hidden, head, beta=0.0).value
    )


def test_padded_vocabularies_are_cut_to_what_both_have():
    hidden, other = normal(TOKENS, WIDTH, seed=5), normal(TOKENS, WIDTH, seed=6)
    weight = normal(VOCABULARY + 8, WIDTH, seed=2)
    short, long = Head(weight[:VOCABULARY], 1.0), Head(weight, 1.0)
    expected = divergence(hidden, short, other, short, beta=0.5).value
    torch.testing.assert_close(divergence(hidden, long, other, short, beta=0.5).value, expected)
    torch.testing.assert_close(divergence(hidden, short, other, long, beta=0.5).value, expected)


def test_bad_inputs_are_refused():
    hidden, head = normal(TOKENS, WIDTH, seed=5), Head(normal(VOCABULARY, WIDTH, seed=2), 1.0)
    with pytest.raises(ValueError, match=r"beta is 1\.5; expected 0"):
        divergence(hidden, head, hidden, head, beta=1.5)
    with pytest.raises(ValueError, match="the student has 7 tokens and the teacher 6"):
        divergence(hidden, head, hidden[:6], head, beta=0.5)
