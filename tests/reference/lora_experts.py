"""LoRA adapters on the experts of a mixture, added by a loop over rows in fp64. Tests compare the kernel with it."""

from collections.abc import Sequence

import torch
from torch import Tensor


def add_lora_reference(
    y: Tensor,
    x: Tensor,
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    indices: Tensor,
    enabled: Tensor,
    ids: Tensor,
    weights: Tensor | None = None,
) -> Tensor:
    """Return what ``kernels.lora_experts.add_lora`` defines, [S, N] fp64."""
    out, chosen = y.double(), ids.shape[1]
    for row, expert in enumerate(ids.flatten().tolist()):
        if enabled[0] and indices[row // chosen] >= 0 and 0 <= expert < len(a[0]):
            inputs = x[row * len(x) // len(y)].double()
            update = torch.cat([n[expert].double() @ (m[expert].double() @ inputs) for m, n in zip(a, b, strict=True)])
            out[row] += update if weights is None else update * weights.flatten()[row].double()
    return out
