"""Launching a kernel while the one before it still runs (programmatic dependent launch, from Hopper on).

In decoding, a kernel of a few microseconds spends one or two of them on being launched and on the last programs of the
one before. One that is launched early follows three rules, which together keep every result what it would be otherwise:
before ``gdc_wait`` it reads weights alone, which no kernel of a forward pass writes; every program waits before it lets
the next kernel start; and all that is written is written after that. So when a kernel has waited for the one before it,
that one has waited too, and all that is older is complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor


def launch_options(tensor: Tensor, warps: int, *, early: bool = True) -> Mapping[str, int]:
    """Triton's options of a launch, and the kernel's EARLY.

    Args:
        tensor: one that the kernel works on.
        warps: of a program.
        early: False launches it after the kernel before it.
    """
    early = early and tensor.is_cuda and can_start_early(tensor.device)
    return {"num_warps": warps, "EARLY": early} | ({"launch_pdl": True} if early else {})


@cache
def can_start_early(device: torch.device) -> bool:
    """Whether a GPU launches kernels early."""
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
