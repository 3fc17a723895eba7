"""Log-probabilities that are computed in chunks of tokens, and their gradients, equal the definition, and no tensor of
shape [T, V] is kept."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from qerl_pl.policy.logprobs import HEAD_ROWS, fp32_logits, token_logprobs


def naive(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, cap: float | None = None):
    """Compute log-probabilities and entropies by their definition: logits of all tokens at once, log-softmax, and sums
    over the vocabulary."""
    logits = hidden @ weight.t()
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    log_p = (logits / temperature).log_softmax(dim=1)
    return log_p[torch.arange(len(targets)), targets], -(log_p.exp() * log_p).sum(dim=1)


def draw(seed: int, tokens: int, hidden_size: int, vocabulary: int, dtype: torch.dtype = torch.float64):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, hidden_size, generator=generator, dtype=dtype)
    weight = torch.randn(vocabulary, hidden_size, generator=generator, dtype=dtype)
    return hidden, weight, torch.randint(vocabulary, (tokens,), generator=generator)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(0, 9),
    hidden_size=st.integers(1, 5),
    vocabulary=st.integers(1, 13),
    rows=st.integers(1, 10),
    temperature=st.sampled_from([1.0, 0.6, 1.7]),
    cap=st.sampled_from([None, 0.8, 30.0]),
    upstream=st.sampled_from([(1.0, 0.0), (0.0, 1.0), (1.0, -0.3)]),
    early=st.booleans(),
)
def test_values_and_gradients_equal_the_naive_way(
    seed, tokens, hidden_size, vocabulary, rows, temperature, cap, upstream, early
):
    hidden, weight, targets = draw(seed, tokens, hidden_size, vocabulary)
    hidden.requires_grad_()
    options = {"logit_cap": cap, "slope_in_forward": early, "chunk_bytes": 8 * vocabulary * rows}
    found = token_logprobs(hidden, weight, targets, temperature=temperature, **options)
    expected = naive(hidden, weight, targets, temperature, cap)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    each = torch.randn(2, tokens, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    each *= torch.tensor(upstream, dtype=torch.float64).unsqueeze(1)
    gradients = [torch.autograd.grad((each * torch.stack(outputs)).sum(), hidden) for outputs in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("early", [False, True])
def test_the_entropy_alone_or_the_logprobs_alone_can_be_backpropagated(early):
    hidden, weight, targets = draw(1, 6, 4, 9)
    hidden.requires_grad_()
    for index in range(2):
        outputs = token_logprobs(hidden, weight, targets, slope_in_forward=early)
        expected = naive(hidden, weight, targets, 1.0)
        gradients = [torch.autograd.grad(pair[index].sum(), hidden) for pair in (outputs, expected)]
        torch.testing.assert_close(*gradients)


class LargestTensor(TorchDispatchMode):
    """Records the largest number of elements of any tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


@pytest.mark.parametrize("early", [False, True])
def test_no_tensor_of_tokens_by_vocabulary_is_made_or_kept(early):
    tokens, hidden_size, vocabulary, rows = 60, 4, 101, 3
    hidden, weight, targets = draw(3, tokens, hidden_size, vocabulary)
    saved: list[Tensor] = []
    hidden.requires_grad_()
    with LargestTensor() as largest:
        with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
            logprobs, entropy = token_logprobs(
                hidden, weight, targets, slope_in_forward=early, chunk_bytes=8 * vocabulary * rows
            )
        loss = logprobs.sum() + entropy.sum()
        torch.autograd.grad(loss, hidden)
    assert largest.elements == max(rows * vocabulary, vocabulary * hidden_size)
    new = [tensor for tensor in saved if all(tensor.data_ptr() != t.data_ptr() for t in (hidden, weight, targets))]
    assert sum(tensor.numel() for tensor in new) <= 2 * tokens + early * hidden.numel()


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_logits_of_half_precision_are_not_rounded(rows, dtype, with_bias):
    hidden, weight = torch.randn(rows, 24).to(dtype), torch.randn(2 * HEAD_ROWS + 3, 24).to(dtype)
    bias = torch.randn(len(weight)).to(dtype) if with_bias else None
    found = fp32_logits(hidden, weight, bias)
    exact = torch.nn.functional.linear(hidden.double(), weight.double(), None if bias is None else bias.double())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, exact.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_of_half_precision_the_gradient_alone_is_rounded(dtype, early):
    hidden, weight, targets = draw(4, 50, 64, 200)
    hidden, weight = (hidden / 4).to(dtype), (weight / 4).to(dtype)
    exact_hidden = hidden.double().requires_grad_()
    exact = naive(exact_hidden, weight.double(), targets, 1.0)
    (exact_gradient,) = torch.autograd.grad(exact[0].sum(), exact_hidden)
    found = token_logprobs(hidden.requires_grad_(), weight, targets, slope_in_forward=early)
    (gradient,) = torch.autograd.grad(found[0].sum(), hidden)
    assert found[0].dtype == found[1].dtype == torch.float32
    assert gradient.dtype == dtype
    eps = torch.finfo(dtype).eps
    largest = (hidden.detach().double() @ weight.double().t()).abs().max()
    for value, wanted in zip(found, exact, strict=True):
        torch.testing.assert_close(value.double(), wanted, rtol=0, atol=1e-5)
    assert (gradient - exact_gradient).abs().max() <= 4 * eps * largest * weight.double().abs().max()


def test_autocast_does_not_lower_the_precision():
    hidden, weight, targets = draw(5, 20, 16, 50, torch.float32)
    expected = token_logprobs(hidden, weight, targets)
    with torch.autocast("cpu", torch.bfloat16):
        found = token_logprobs(hidden, weight, targets)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_large_logits_do_not_overflow():
    hidden, weight, targets = draw(6, 5, 3, 7, torch.float32)
    logprobs, entropy = token_logprobs(1e4 * hidden.requires_grad_(), weight, targets)
    (gradient,) = torch.autograd.grad(logprobs.sum() + entropy.sum(), hidden)
    assert logprobs.isfinite().all()
    assert entropy.isfinite().all()
    assert gradient.isfinite().all()


HIDDEN, WEIGHT, TARGETS = draw(7, 4, 3, 5)


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"hidden": HIDDEN[0]}, "expected \\[T, H\\]"),
        ({"weight": WEIGHT[:, :2]}, "expected \\[T, H\\]"),
        ({"weight": WEIGHT.float()}, "weight is torch.float32"),
        ({"targets": TARGETS[:2]}, "targets is torch.int64"),
        ({"targets": TARGETS.int()}, "targets is torch.int32"),
        ({"targets": TARGETS - 100}, "targets run from"),
        ({"targets": torch.full_like(TARGETS, 5)}, "in \\[0, 5\\)"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"weight": WEIGHT.clone().requires_grad_()}, "freeze it"),
    ],
)
def test_bad_arguments_are_named(bad, named):
    with pytest.raises(ValueError, match=named):
        token_logprobs(**{"hidden": HIDDEN, "weight": WEIGHT, "targets": TARGETS, **bad})
