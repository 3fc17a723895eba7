"""The Triton kernels for softmax and related functions equal their definitions. They run on the GPU if there is one,
else in Triton's interpreter."""

from importlib import import_module

import pytest
import torch
from torch import Tensor

from qerl_pl.policy.logprobs import logit_gradient_reference, statistics_reference, token_logprobs
from tests.combinations import pairwise

KERNELS = "qerl_pl.kernels.softmax"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK = 64  # small: the interpreter works through the last reduction element by element
SHAPES = [
    (1, 1),
    (3, 7),
    (2, BLOCK),
    (3, BLOCK + 1),
    (2, 200),
]  # one block exactly, one column more, the last one short


@pytest.fixture
def small_blocks(kernels, monkeypatch) -> None:
    monkeypatch.setattr(kernels, "BLOCK", BLOCK)


def draw(rows: int, vocabulary: int, scale: float = 5.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * vocabulary)
    logits = scale * torch.randn(rows, vocabulary, generator=generator)
    return logits.to(DEVICE), torch.randint(vocabulary, (rows,), generator=generator).to(DEVICE)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.013])
@pytest.mark.parametrize("shape", SHAPES)
def test_statistics_equal_their_definition(kernels, small_blocks, shape, temperature):
    logits, targets = draw(*shape)
    expected = statistics_reference(logits.double(), targets, temperature)
    found = kernels.statistics(logits, targets, temperature)
    for value, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(value.double(), exact, rtol=2e-6, atol=2e-5)  # sums of V fp32 terms near 30 nats


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [768, 151_936])
def test_statistics_on_the_gpu_are_finite_at_all_temperatures(vocabulary):
    # Lanes outside of the vocabulary once gave nan at about half of the temperatures above 1.
    kernels = import_module(KERNELS)
    logits, targets = draw(2, vocabulary)
    for step in range(1, 101):
        for values in kernels.statistics(logits, targets, step / 50):
            assert values.isfinite().all(), step / 50


@pytest.mark.parametrize("offset", [-1e4, 1e4])
def test_statistics_do_not_overflow(kernels, small_blocks, offset):
    logits, targets = draw(3, 200)
    logprobs, entropy, log_partition = kernels.statistics(logits + offset, targets, 1.0)
    expected = statistics_reference((logits + offset).double(), targets, 1.0)
    torch.testing.assert_close(logprobs.double(), expected[0], rtol=1e-5, atol=2e-3)  # one ulp of 1e4 is 1e-3
    torch.testing.assert_close(entropy.double(), expected[1], rtol=1e-5, atol=2e-3)
    torch.testing.assert_close(log_partition.double(), expected[2], rtol=1e-6, atol=2e-3)


@pytest.mark.parametrize(
    ("shape", "temperature", "with_entropy", "dtype"),
    pairwise(SHAPES, (1.0, 0.6, 1.013), (True, False), (torch.float32, torch.bfloat16)),
    ids=str,
)
def test_gradients_equal_their_definition(kernels, small_blocks, shape, temperature, with_entropy, dtype):
    logits, targets = draw(*shape)
    _, entropy, log_partition = statistics_reference(logits.double(), targets, temperature)
    upstream = torch.tensor(0.7, device=DEVICE).expand(len(logits))  # as autograd gives it below a sum
    on_entropy = torch.linspace(-1, 1, len(logits), device=DEVICE) if with_entropy else None
    found = kernels.logit_gradient(
        logits, targets, temperature, entropy.float(), log_partition.float(), upstream, on_entropy, dtype
    )
    expected = logit_gradient_reference(
        logits.double(),
        targets,
        temperature,
        entropy,
        log_partition,
        upstream.double(),
        None if on_entropy is None else on_entropy.double(),
        torch.float64,
    )
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=torch.finfo(dtype).eps + 1e-4, atol=1e-6)


@pytest.mark.gpu
def test_logprobs_on_the_gpu_equal_the_definition_and_stay_in_their_memory():
    tokens, hidden_size, vocabulary = 2000, 896, 151_936
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, generator=generator, device="cuda").bfloat16().requires_grad_()
    weight = (torch.randn(vocabulary, hidden_size, generator=generator, device="cuda") / 8).bfloat16()
    targets = torch.randint(vocabulary, (tokens,), generator=generator, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logprobs, entropy = token_logprobs(hidden, weight, targets, temperature=0.7)
    (gradient,) = torch.autograd.grad(logprobs.sum() - entropy.sum(), hidden)
    assert torch.cuda.max_memory_allocated() - before <= 2**30
    for start in range(0, tokens, 500):
        part = slice(start, start + 500)
        exact_hidden = hidden[part].detach().double().requires_grad_()
        log_p = (exact_hidden @ weight.double().t() / 0.7).log_softmax(dim=1)
        exact = log_p.gather(1, targets[part].unsqueeze(1)).squeeze(1), -(log_p.exp() * log_p).sum(dim=1)
        (exact_gradient,) = torch.autograd.grad(exact[0].sum() - exact[1].sum(), exact_hidden)
        # fp32 sums of 896 products near 1 for a logit, of 151 936 terms for the rest
        torch.testing.assert_close(logprobs[part].double(), exact[0], rtol=0, atol=1e-3)
        torch.testing.assert_close(entropy[part].double(), exact[1], rtol=0, atol=1e-3)
        error = (gradient[part].double() - exact_gradient).norm(dim=1) / exact_gradient.norm(dim=1)
        assert error.max() < 4 * torch.finfo(torch.bfloat16).eps  # rounded as logit gradients, and as the result
