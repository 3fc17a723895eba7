"""The kernel for log-probabilities of sampled tokens equals its definition. It runs on the GPU if there is one, else in
Triton's interpreter."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.kernels.conftest import _uninitialised_memory_is_nan  # noqa: F401
from tests.reference.token_scores import token_scores_reference

KERNELS = "qerl_pl.hopper.token_scores"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BLOCK = 64
SHAPES = [(1, 1), (3, 7), (2, BLOCK), (3, BLOCK + 1), (5, 300), (0, 10)]


@pytest.fixture(autouse=True)
def _small_blocks(kernels, monkeypatch) -> None:
    monkeypatch.setattr(kernels, "BLOCK", BLOCK)


def draw(rows: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * vocabulary)
    logits = 5 * torch.randn(rows, vocabulary, generator=generator)
    return logits.to(DEVICE), torch.randint(vocabulary, (rows,), generator=generator).to(DEVICE)


def check(kernels: ModuleType, logits: Tensor, tokens: Tensor) -> None:
    logprobs, ranks = kernels.token_scores(logits, tokens)
    exact, exact_ranks = token_scores_reference(logits, tokens)
    torch.testing.assert_close(logprobs.double(), exact, rtol=2e-6, atol=2e-5)
    assert torch.equal(ranks, exact_ranks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scores_equal_their_definition(kernels, shape, dtype):
    logits, tokens = draw(*shape)
    check(kernels, logits.to(dtype), tokens)


@pytest.mark.parametrize("offset", [-1e4, 1e4])
def test_they_do_not_overflow(kernels, offset):
    logits, tokens = draw(3, 200)
    check(kernels, logits + offset, tokens)


def test_tokens_that_cannot_be_sampled_take_no_part(kernels):
    logits, tokens = draw(4, 200)
    logits[:, :150] = float("-inf")  # whole blocks of them, as top_k leaves them
    check(kernels, logits, tokens % 50 + 150)


def test_equal_logits_share_the_worst_rank(kernels):
    logits = torch.zeros(2, 100, device=DEVICE)
    _, ranks = kernels.token_scores(logits, torch.tensor([0, 99], device=DEVICE))
    assert ranks.tolist() == [100, 100]


def test_rows_may_lie_apart(kernels):
    logits, tokens = draw(4, 200)
    check(kernels, logits[::2, :90], tokens[::2] % 90)
