"""Checksums of tensors, computed where these are: an adapter of 80 million values takes milliseconds on a GPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
"""Bytes of an element -> a dtype that shows its bits."""


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """64 bits for each tensor, of its elements' bits in row-major order, whatever its device, strides or dtype.

    It is sum_i (b_i + 1) m_i modulo 2^64: b_i are the bits of element i as a signed integer, and m_i is odd and drawn
    from i. So one changed element always shows, several unless their changes cancel, and so does a tail of zeros.
    Exact integers: every device gives the same sum.

    Args:
        tensors: of real dtypes of at most 4 bytes.
    """
    longest: dict[torch.device, int] = {}
    for tensor in tensors.values():
        longest[tensor.device] = max(longest.get(tensor.device, 0), tensor.numel())
    factors = {device: _factors(length, device) for device, length in longest.items()}
    sums: dict[torch.device, dict[str, Tensor]] = {device: {} for device in longest}
    for name, tensor in tensors.items():
        bits = tensor.detach().contiguous().view(-1).view(BITS[tensor.element_size()]).long()
        sums[tensor.device][name] = ((bits + 1) * factors[tensor.device][: len(bits)]).sum()
    found = {
        name: value
        for of_device in sums.values()
        for name, value in zip(of_device, torch.stack([*of_device.values()]).tolist(), strict=True)
    }
    return {name: found[name] for name in tensors}


def _factors(length: int, device: torch.device) -> Tensor:
    """[length] int64, odd: the finaliser of SplitMix64 (Steele, Lea and Flood, 2014) with one round."""
    mixed = torch.arange(length, device=device) * -0x61C8864680B583EB
    mixed = (mixed ^ (mixed >> 30)) * -0x40A7B892E31B1A47
    return (mixed ^ (mixed >> 27)) | 1
