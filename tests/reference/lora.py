"""LoRA adapters added by a loop over rows in fp64, the definition that tests compare ``kernels.lora`` with."""

from collections.abc import Sequence

import torch
from torch import Tensor


def add_lora_reference(y: Tensor, x: Tensor, a: Sequence[Tensor], b: Sequence[Tensor], indices: Tensor) -> Tensor:
    """Return y + (x A^T) B^T, [T, N] fp64, computed row by row."""
    out = y.double()
    for row in (indices[: len(x)] >= 0).nonzero().flatten().tolist():
        update = [second.double() @ (first.double() @ x[row].double()) for first, second in zip(a, b, strict=True)]
        out[row] += torch.cat(update)
    return out
