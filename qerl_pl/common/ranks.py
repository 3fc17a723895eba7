"""Collective operations over the ranks of a run; in a run of one rank they return their input.

Every rank must call the same functions in the same order, even if it has no completions; otherwise the other ranks
would wait for it without end.
"""

from collections.abc import Sequence
from itertools import chain, zip_longest
from typing import TypeVar

import torch
from torch import Tensor
from torch import distributed as dist
from torchmetrics.utilities.distributed import gather_all_tensors

T = TypeVar("T")


def num_ranks() -> int:
    """Return the number of processes of the run."""
    return dist.get_world_size() if dist.is_initialized() else 1


def are_several() -> bool:
    """Return whether the run has more than one process."""
    # an initialised process group is not enough: in a run of one process vLLM creates one for itself
    return num_ranks() > 1


def rank() -> int:
    """Return the index of this process, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def mean(value: Tensor) -> Tensor:
    """Average a floating-point tensor over the ranks; it must have the same shape on every rank."""
    if num_ranks() == 1:
        return value
    total = value.detach().to(device(), copy=True)
    dist.all_reduce(total)
    return (total / num_ranks()).to(value.device)


def gather(rows: Tensor) -> Tensor:
    """Concatenate the rows [N, ...] of all ranks in the order of the ranks; only N may differ between ranks."""
    if num_ranks() == 1:
        return rows
    return torch.cat(gather_all_tensors(rows.detach().to(device()))).to(rows.device)


def gather_values(value: T) -> list[T]:
    """Gather one picklable value per rank, in the order of the ranks; tensors in it must be on the CPU."""
    if num_ranks() == 1:
        return [value]
    values: list[T | None] = [None] * num_ranks()
    dist.all_gather_object(values, value)
    return values  # pyright: ignore[reportReturnType]


def own_places(number: int) -> range:
    """Return the indices, in the whole batch of prompts, of the ``number`` prompts of this rank: r, r + W, r + 2W, ...
    for rank r of W."""
    return range(rank(), number * num_ranks(), num_ranks())


def gather_groups(rows: Sequence[T], group_size: int) -> list[T]:
    """Gather values of completions from all ranks, and return them on every rank in the order of the whole batch of
    prompts, of which rank r of W has the prompts r, r + W, ... ``rows`` has one value for each completion of this rank,
    ``group_size`` for a prompt; ranks may have different numbers of prompts."""
    shares = [[part[i : i + group_size] for i in range(0, len(part), group_size)] for part in gather_values(rows)]
    turns = chain.from_iterable(zip_longest(*shares, fillvalue=()))
    return list(chain.from_iterable(turns))


def average_gradients(parameters: Sequence[Tensor]) -> None:
    """Replace each parameter's gradient by its mean over the ranks; a missing gradient counts as zero."""
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    if num_ranks() == 1:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        return
    averaged = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(averaged)
    averaged /= num_ranks()
    for parameter, gradient in zip(parameters, averaged.split([p.numel() for p in parameters]), strict=True):
        parameter.grad = gradient.view_as(parameter)


def device() -> torch.device:
    """Return the device on which the process group's collectives run."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
