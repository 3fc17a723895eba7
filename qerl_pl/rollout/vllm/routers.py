"""Routers of mixture-of-experts layers in vLLM with logits in fp32, as in the trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def in_fp32(_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of the ``forward`` of vLLM's router for mixture-of-experts layers. It computes the router's
    logits in fp32, whereas vLLM's own rounds them to 16 bits."""

    def forward(self: Any, x: Tensor) -> Any:
        logits = logits_of(x, self.weight)
        return (logits, None) if self.return_bias else logits

    return forward


def logits_of(x: Tensor, weight: Tensor) -> Tensor:
    """Compute the logits of a mixture-of-experts router with the weight [E, H] for E experts, given T tokens x [T, H]:
    [T, E] fp32. On a GPU, one kernel multiplies bf16 inputs and gives an fp32 result; this is as exact as converting
    the inputs to fp32 first, because products of bf16 numbers are exact in fp32."""
    if x.is_cuda and x.dtype == weight.dtype == torch.bfloat16:
        return torch.mm(x, weight.T, out_dtype=torch.float32)
    return F.linear(x.float(), weight.float())
