"""The divisor's law over processes: rows split over ranks give the gradients of the whole batch."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing

from qerl_pl.objective.losses import Aggregation, clipped_policy_loss, count_divisor, row_weights

AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)
MAX_TOKENS = 11


def gradient(rows: list[Tensor], weights: Tensor) -> Tensor:
    """Of the loss with respect to the logprobs, [B, S]; rows are logprobs, old logprobs, advantages, mask."""
    logprobs = rows[0].detach().requires_grad_()
    clipped_policy_loss(logprobs, rows[1], rows[2], rows[3], weights).loss.backward()
    assert logprobs.grad is not None
    return logprobs.grad


def on_rank(rank: int, path: str, batch: list[Tensor], queue) -> None:
    """Every second row is this rank's."""
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    mine = [field[rank::2] for field in batch]
    for aggregation in AGGREGATIONS:
        divisor = count_divisor(mine[3], aggregation, max_tokens=MAX_TOKENS)
        dist.all_reduce(divisor)
        summed = gradient(mine, row_weights(mine[3], aggregation, divisor))
        averaged = gradient(mine, row_weights(mine[3], aggregation, divisor / 2)) / 2  # as DDP does
        queue.put((rank, aggregation, summed.tolist(), averaged.tolist()))
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_give_the_gradient_of_one(tmp_path):
    generator = torch.Generator().manual_seed(1)
    logprobs = -torch.rand(5, 6, generator=generator, dtype=torch.float64)
    old = logprobs + 0.4 * torch.randn(5, 6, generator=generator, dtype=torch.float64)
    advantages = torch.randn(5, generator=generator, dtype=torch.float64)
    mask = torch.rand(5, 6, generator=generator) < torch.tensor([1.0, 0.2, 0.9, 0.0, 0.5]).unsqueeze(1)
    batch = [logprobs, old, advantages, mask]
    queue = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(on_rank, (str(tmp_path / "store"), batch, queue), nprocs=2)
    for _ in range(2 * len(AGGREGATIONS)):
        rank, aggregation, summed, averaged = queue.get()
        weights = row_weights(mask, aggregation, count_divisor(mask, aggregation, max_tokens=MAX_TOKENS))
        whole = gradient(batch, weights)[rank::2]
        assert torch.equal(torch.tensor(summed, dtype=torch.float64), whole)
        torch.testing.assert_close(torch.tensor(averaged, dtype=torch.float64), whole, rtol=1e-15, atol=0)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_one_token_on_two_ranks_is_not_taken_for_an_empty_batch(aggregation):
    mask = torch.tensor([[True, False]])
    divisor = count_divisor(mask, aggregation, max_tokens=1) / 2  # gradients are averaged over two ranks
    assert row_weights(mask, aggregation, divisor).tolist() == [2.0]
