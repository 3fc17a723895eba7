"""What the ranks of a run tell one another. In a run of one rank every function gives back what it was given.

All are collective: every rank makes the same calls in the same order, whatever its share of the batch looks like.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, zip_longest
from typing import TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torchmetrics.utilities.distributed import gather_all_tensors

T = TypeVar("T")


def num_ranks() -> int:
    """Processes of the run."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """This process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def mean(value: Tensor) -> Tensor:
    """Mean over ranks of a floating-point tensor that has the same shape on all of them."""
    if num_ranks() == 1:
        return value
    total = value.detach().to(device(), copy=True)
    dist.all_reduce(total)
    return (total / num_ranks()).to(value.device)


def gather(rows: Tensor) -> Tensor:
    """[N, ...] of each rank -> the rows of all, rank after rank; N may differ, the other sizes may not."""
    if num_ranks() == 1:
        return rows
    return torch.cat(gather_all_tensors(rows.detach().to(device()))).to(rows.device)


def gather_values(value: T) -> list[T]:
    """What each rank gave, by rank: anything that can be pickled and is on no GPU."""
    if num_ranks() == 1:
        return [value]
    values: list[T | None] = [None] * num_ranks()
    dist.all_gather_object(values, value)
    return values  # pyright: ignore[reportReturnType]


def gather_groups(rows: Sequence[T], group_size: int) -> list[T]:
    """The rows of all ranks in the order of the whole batch, of which rank r of W has the groups r, r + W, r + 2W, ...

    Args:
        rows: of this rank, group by group; ranks may have different numbers of groups.
        group_size: rows of a group.
    """
    shares = [[part[i : i + group_size] for i in range(0, len(part), group_size)] for part in gather_values(rows)]
    turns = chain.from_iterable(zip_longest(*shares, fillvalue=()))
    return list(chain.from_iterable(turns))


def average_gradients(parameters: Sequence[Tensor]) -> None:
    """Give every rank the mean of the gradients of all.

    A rank without a gradient, because no row of its share has one, counts as zeros. Where no rank has one, none gets
    one.
    """
    if num_ranks() == 1:
        return
    has_gradient = any(parameter.grad is not None for parameter in parameters)
    if not any(gather_values(has_gradient)):
        return
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    averaged = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(averaged)
    averaged /= num_ranks()
    for parameter, gradient in zip(parameters, averaged.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = gradient.view_as(parameter)


def device() -> torch.device:
    """Where the process group's collectives run."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
