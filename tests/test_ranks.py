"""Values that ranks exchange, checked on two ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor

from qerl_pl.common import ranks
from tests.two_ranks import on_two_ranks


def _talk(rank: int) -> dict[str, Any]:
    rows = torch.arange(2.0 + rank).unsqueeze(1) + 10 * rank  # [2, 1] and [3, 1]
    words = [f"{rank}{letter}" for letter in ("aabb", "aabbcc")[rank]]
    return {
        "num_ranks": ranks.num_ranks(),
        "mean": ranks.mean(torch.tensor([1.0, 4.0 * rank])).tolist(),
        "gather": ranks.gather(rows).flatten().tolist(),
        "gather_none": ranks.gather(torch.arange(2.0 - 2 * rank)).tolist(),
        "gather_values": ranks.gather_values({"rank": rank}),
        "gather_groups": ranks.gather_groups(words, 2),
        "gradients": [_averaged(one, other) for one, other in _gradients(rank)],
    }


def _gradients(rank: int) -> list[tuple[list[float] | None, list[float] | None]]:
    """Make this rank's gradients of two parameters in three cases: both ranks have gradients, only rank 1 has them, or
    none has."""
    return [([1.0 + rank], [2.0, 4.0 * rank]), (([3.0], [5.0, 7.0]) if rank else (None, None)), (None, None)]


def _averaged(*gradients: list[float] | None) -> list[list[float] | None]:
    parameters = [torch.zeros(1), torch.zeros(2)]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = None if gradient is None else torch.tensor(gradient)
    ranks.average_gradients(parameters)
    return [None if parameter.grad is None else parameter.grad.tolist() for parameter in parameters]


@pytest.mark.slow
def test_every_rank_learns_the_same_whatever_its_share(tmp_path):
    one, other = on_two_ranks(_talk, tmp_path)
    assert one == other
    assert one == {
        "num_ranks": 2,
        "mean": [1.0, 2.0],
        "gather": [0.0, 1.0, 10.0, 11.0, 12.0],
        "gather_none": [0.0, 1.0],
        "gather_values": [{"rank": 0}, {"rank": 1}],
        "gather_groups": ["0a", "0a", "1a", "1a", "0b", "0b", "1b", "1b", "1c", "1c"],
        "gradients": [[[1.5], [2.0, 2.0]], [[1.5], [2.5, 3.5]], [[0.0], [0.0, 0.0]]],
    }


def test_one_rank_keeps_what_it_has():
    rows = torch.arange(4.0)
    assert ranks.mean(rows) is rows
    assert ranks.gather(rows) is rows
    assert ranks.gather_values("a") == ["a"]
    assert ranks.gather_groups([1, 2, 3, 4], 2) == [1, 2, 3, 4]
    parameter: Tensor = torch.zeros(2)
    ranks.average_gradients([parameter])
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [0.0, 0.0]
