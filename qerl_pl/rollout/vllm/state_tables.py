"""Copies of vLLM's tables of the sequences' state, such as temperatures, to the GPU. Only ``patches`` imports this
module."""

from __future__ import annotations

import numpy as np
import torch
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor


def copy_if_changed(self: UvaBackedTensor, n: int | None = None) -> torch.Tensor:
    """Copy a table of the sequences' state to the GPU, always to the same address, if it has changed since the last
    call; replaces ``UvaBackedTensor.copy_to_uva``.

    Args:
        self: the table, whose array on the host is ``self.np``.
        n: number of rows to return; None: all.
    """
    copied = vars(self).get("copied")  # values on the GPU; None: ``self.gpu`` is still vLLM's buffer
    if copied is None:
        self.gpu = torch.zeros_like(self.gpu)
    if copied is None or not np.array_equal(copied, self.np):
        async_tensor_h2d(self.np, out=self.gpu)
        vars(self)["copied"] = self.np.copy()
    return self.gpu[:n]
