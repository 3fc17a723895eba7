"""Checksums of tensors, computed on their device: milliseconds for an adapter of 80 million values on a GPU."""

from collections.abc import Mapping

import torch
from torch import Tensor

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
"""Integer dtype as which the bits of an element are read, by the element's size in bytes."""
AT_ONCE = 2**20
"""Largest number of elements of equally shaped tensors that are stacked and added up in one call. A larger limit means
fewer kernel launches and more memory, about 24 bytes per element."""


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Compute a 64-bit checksum of each tensor, by name. Elements may have at most 4 bytes.

    The checksum is sum_i (b_i + 1) m_i modulo 2^64, where b_i are the bits of element i, in row-major order, as a
    signed integer, and m_i is a pseudo-random odd number that depends only on i. A single changed element always
    changes the sum, and so do appended zeros; several changed elements change it unless their changes cancel. The
    arithmetic is exact, so the sum does not depend on device or strides.
    """
    alike: dict[tuple[torch.Size, torch.dtype, torch.device], list[str]] = {}
    longest: dict[torch.device, int] = {}
    for name, tensor in tensors.items():
        alike.setdefault((tensor.shape, tensor.dtype, tensor.device), []).append(name)
        longest[tensor.device] = max(longest.get(tensor.device, 0), tensor.numel())
    factors = {device: _factors(length, device) for device, length in longest.items()}
    sums: dict[torch.device, list[Tensor]] = {device: [] for device in longest}
    order: dict[torch.device, list[str]] = {device: [] for device in longest}
    for (shape, dtype, device), names in alike.items():
        length = shape.numel()
        at_once = max(1, AT_ONCE // max(1, length))
        for first in range(0, len(names), at_once):
            part = names[first : first + at_once]
            stacked = torch.stack([tensors[name].detach() for name in part]).view(len(part), length)
            bits = stacked.view(BITS[dtype.itemsize]).long()
            sums[device].append(((bits + 1) * factors[device][:length]).sum(1))
            order[device] += part
    by_name: dict[str, int] = {}
    for device, names in order.items():
        by_name.update(zip(names, torch.cat(sums[device]).tolist(), strict=True))
    return {name: by_name[name] for name in tensors}


def _factors(length: int, device: torch.device) -> Tensor:
    """Compute the factors m_i of ``checksums``, [length] int64, by one round of SplitMix64's finaliser (Steele, Lea and
    Flood, 2014)."""
    mixed = torch.arange(length, device=device) * -0x61C8864680B583EB
    mixed = (mixed ^ (mixed >> 30)) * -0x40A7B892E31B1A47
    return (mixed ^ (mixed >> 27)) | 1
