"""Frozen linear and its LoRA update as one node of the autograd graph.

    y = x W^T + bias + (x A^T) (s B)^T

Letters: T tokens, K inputs, N outputs, r rank, s the scale alpha / r. The product s B is rounded to the compute dtype
once (``scaled``), and rollout engines hold the same values; if s is no power of two, rounding B before the
multiplication would give other values. The adapter's product is accumulated in the base's matrix product, forward and
backward, so no [T, N] or [T, K] tensor is read or written only for an addition, and gradients of the fp32 master
weights are never rounded to the compute dtype. Autograd keeps x, x A^T, A and s B in the compute dtype; W is
dequantised again in backward. With few tokens, the CPU's launch overhead bounds the time, so there is one autograd node
and as few operations as possible.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qerl_pl.policy.kept import Kept

Dense = Callable[[torch.dtype], Tensor]


def lora_product_reference(
    x: Tensor, dense: Dense, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float
) -> Tensor:
    """Compute ``lora_product`` by plain operations, as its definition."""
    y = x @ dense(x.dtype).t() + (x @ a.to(x.dtype).t()) @ (scaling * b).to(x.dtype).t()
    return y if bias is None else y + bias


def scaled(b: Tensor, scaling: float, dtype: torch.dtype) -> Tensor:
    """Compute s B from the fp32 master weights, rounded once to ``dtype``: the matrix that trainer and engines use."""
    return torch.mul(b, scaling, out=b.new_empty(b.shape, dtype=dtype))


def lora_product(
    x: Tensor, dense: Dense, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float, *, kept: Kept | None = None
) -> Tensor:
    """Compute y = x W^T + bias + (x A^T) (s B)^T, differentiable with respect to x, A and B.

    Args:
        x: [..., K] of any floating dtype, in which the products are computed.
        dense: returns W [N, K] in a given dtype, always with the same values. It is called once per product, so a
            dequantised W is in memory only during one product.
        bias: [N], frozen.
        a: [r, K] fp32 (fp64 for fp64 products), the master weights of A.
        b: [N, r] of the same dtype, the master weights of B.
        scaling: s.
        kept: stores the result, and returns it when a checkpointed block is recomputed; None if nothing is kept.

    Returns:
        [..., N] in the dtype of x.
    """
    known = kept.take().detach() if kept is not None and kept.recomputing else None
    y, inner, low_b = _Adapted.apply(x, a, b, dense, scaling, known)
    if known is not None:
        return y
    with torch.no_grad():
        # The products are written to the memory that the autograd node allocated, after the node has saved its tensors.
        # torch.utils.checkpoint stops recomputing a block at the last tensor that the block saves, so the product of a
        # block's last linear, a quarter of the block's work, is not recomputed.
        rows, out = x.reshape(-1, x.shape[-1]), y.view(-1, y.shape[-1])  # [T, K], [T, N]
        if bias is None:
            torch.mm(inner, low_b.t(), out=out)
        else:
            torch.addmm(bias.to(x.dtype), inner, low_b.t(), out=out)
        out.addmm_(rows, dense(x.dtype).t())
    if kept is not None:
        kept.put(y)
    return y


class _Adapted(torch.autograd.Function):
    """Autograd node that computes x A^T and s B, saves what backward needs and allocates y without computing it."""

    @staticmethod
    def forward(
        ctx, x: Tensor, a: Tensor, b: Tensor, dense: Dense, scaling: float, known: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        low_a, low_b = a.to(x.dtype), scaled(b, scaling, x.dtype)
        inner = torch.mm(x.reshape(-1, x.shape[-1]), low_a.t())  # [T, r]
        ctx.save_for_backward(x, inner, low_a, low_b)
        ctx.dense, ctx.scaling, ctx.master = dense, scaling, a.dtype
        ctx.mark_non_differentiable(inner, low_b)
        ctx.set_materialize_grads(False)
        return x.new_empty(*x.shape[:-1], len(b)) if known is None else known, inner, low_b

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor, *_: None) -> tuple[Tensor | None, Tensor, Tensor, None, None, None]:
        x, inner, low_a, low_b = ctx.saved_tensors
        rows, dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])  # [T, K], [T, N]
        d_inner, db = torch.mm(dy, low_b), _product(dy.t(), inner, ctx.master)  # [T, r], [N, r]
        if ctx.scaling != 1:
            db = db.mul_(ctx.scaling)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.mm(d_inner, low_a).addmm_(dy, ctx.dense(dy.dtype)).view(x.shape)
        return dx, _product(d_inner.t(), rows, ctx.master), db, None, None, None


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    if a.is_cuda and a.dtype != dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a, b).to(dtype)
