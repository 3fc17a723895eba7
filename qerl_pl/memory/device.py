"""Bytes of GPU memory that this process and other processes use, as the CUDA driver reports them.

torch's own statistics do not include the memory that vLLM maps for its weights and cache.
"""

import torch

from qerl_pl.memory.parts import CONTEXT

LARGEST_GPU = 4096
"""Largest plausible GPU memory in GiB; a larger setting is refused, because it was probably meant in another unit."""


def check_gpu_memory(gib: float | None, name: str) -> None:
    """Raise ValueError if ``gib``, the value of the setting ``name``, is no plausible size of a GPU's memory in GiB;
    None, for a setting that is not set, is accepted."""
    if gib is not None and not 0 < gib <= LARGEST_GPU:
        raise ValueError(f"{name} is {gib}; expected GiB, more than 0 and at most {LARGEST_GPU}")


def used_bytes(device: torch.device) -> int:
    """Return the bytes in use on a GPU by all processes."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def others_bytes(device: torch.device) -> int:
    """Return the bytes of a GPU that other processes use: all bytes in use, less what torch and the CUDA context of
    this process take. The number is correct only before vLLM starts, because memory of this process that torch does not
    manage, such as vLLM's, would count as that of other processes."""
    return max(0, used_bytes(device) - torch.cuda.memory_reserved(device) - CONTEXT)


def available_bytes(device: torch.device, at_most: float | None = None) -> int:
    """Return the bytes of GPU memory that this process may use, its CUDA context included: all that other processes
    leave free, but at most ``at_most`` GiB."""
    available = torch.cuda.get_device_properties(device).total_memory - others_bytes(device)
    return available if at_most is None else min(available, int(at_most * 2**30))
