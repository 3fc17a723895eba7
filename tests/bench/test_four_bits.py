"""Tests of two parts of bench_four_bits: the statistics of two models from their hidden states, and the choice of the
linear layers that a variant keeps dense."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.bench import bench_four_bits
from tests.bench.bench_four_bits import compare, mean_and_error

GENERATOR = torch.Generator().manual_seed(0)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR)


@pytest.mark.parametrize("cap", [None, 2.0])
def test_tokens_are_compared_by_whole_distributions(monkeypatch: pytest.MonkeyPatch, cap: float | None) -> None:
    monkeypatch.setattr(bench_four_bits, "LOGIT_BYTES", 4 * 11 * 3)  # three tokens at a time
    (dense, other), heads, targets = drawn(2, 7, 5), drawn(2, 11, 5), torch.arange(7)
    values = compare((dense, heads[0]), (other, heads[1]), targets, divisor=1.5, cap=cap)

    def logprobs(hidden: Tensor, head: Tensor) -> Tensor:
        logits = hidden.double() @ head.double().T
        return ((logits if cap is None else cap * (logits / cap).tanh()) / 1.5).log_softmax(-1)

    p, q = logprobs(dense, heads[0]), logprobs(other, heads[1])
    for name, exact in {
        "kl": F.kl_div(q, p, log_target=True, reduction="none").sum(-1),
        "entropy": torch.distributions.Categorical(logits=q).entropy(),
        "logprob_difference": (p - q)[torch.arange(7), targets].abs(),
        "argmax_equal": (p.argmax(-1) == q.argmax(-1)).double(),
    }.items():
        torch.testing.assert_close(getattr(values, name), exact, rtol=1e-4, atol=1e-5)
    assert not compare((dense, heads[0]), (dense, heads[0]), targets, divisor=1.0, cap=cap).kl.any()


def test_the_standard_error_counts_rows_and_not_their_tokens() -> None:
    of_rows = drawn(50).double()
    alone, repeated = torch.arange(50), torch.arange(50).repeat_interleave(9)
    expected = of_rows.mean().item(), of_rows.std().item() / 50**0.5
    assert mean_and_error(of_rows, alone) == pytest.approx(expected)
    assert mean_and_error(of_rows[repeated], repeated) == pytest.approx(expected)
