"""What is taken on a GPU, and by whom.

torch's own counts do not see the memory that vLLM maps for its weights and cache, so these ask the driver.
"""

from __future__ import annotations

import torch

from qerl_pl.memory.parts import CONTEXT

LARGEST_GPU = 4096
"""GiB; more is a number of other units."""


def check_gpu_memory(gib: float | None, name: str) -> None:
    """Refuse what no card has; None is not checked.

    Raises:
        ValueError: the number is NaN, infinite, not above 0, or absurd.
    """
    if gib is not None and not 0 < gib <= LARGEST_GPU:
        raise ValueError(f"{name} is {gib}; expected GiB, more than 0 and at most {LARGEST_GPU}")


def used_bytes(device: torch.device) -> int:
    """Bytes taken on a GPU by all processes."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def others_bytes(device: torch.device) -> int:
    """Bytes that other processes take, asked before this one has more there than a context."""
    return max(0, used_bytes(device) - torch.cuda.memory_reserved(device) - CONTEXT)


def available_bytes(device: torch.device, at_most: float | None = None) -> int:
    """Bytes that this process may come to take, context included, asked as early; at most so many GiB."""
    available = torch.cuda.get_device_properties(device).total_memory - others_bytes(device)
    return available if at_most is None else min(available, int(at_most * 2**30))
