"""Attention of packed rows with full score matrices, the definition that tests compare ``policy.attention`` with."""

from itertools import pairwise

import torch
from torch import Tensor


def packed_attention_reference(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, scale: float | None = None, window: int | None = None
) -> Tensor:
    """Compute ``packed_attention`` row by row with full score matrices."""
    outputs = []
    for start, end in pairwise(starts.tolist()):
        q, k, v = (part[start:end].transpose(0, 1) for part in (query, key, value))  # [heads, S, D]
        k, v = (part.repeat_interleave(len(q) // len(part), dim=0) for part in (k, v))
        scores = q @ k.transpose(1, 2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
        if window is not None:
            hidden |= torch.ones_like(hidden).tril(-window)
        outputs.append((scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs)
