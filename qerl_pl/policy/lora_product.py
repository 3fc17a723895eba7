"""A frozen linear and its LoRA update as one node of the autograd graph.

    y = x W^T + bias + (x A^T) (s B)^T

Letters: T tokens, K in, N out, r rank. s B is rounded once to the compute dtype, and rollout engines hold these same
values (``scaled``); with an alpha / r that is no power of two, B rounded before s would be others. The products of the
adapter and of the base add up inside the base's matrix product, forward and backward, so no [T, N] or [T, K] is read or
written for an addition, and gradients of the fp32 master weights never pass through the compute dtype. Autograd keeps
x, x A^T, A and s B in the compute dtype; W is asked for when it is needed. The host's time counts at small T: there is
one node, and no operation that could be spared.
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
    """The definition; see ``lora_product``."""
    y = x @ dense(x.dtype).t() + (x @ a.to(x.dtype).t()) @ (scaling * b).to(x.dtype).t()
    return y if bias is None else y + bias


def scaled(b: Tensor, scaling: float, dtype: torch.dtype) -> Tensor:
    """s B as trainer and rollout engines multiply by it: of the fp32 master, rounded once, in one kernel."""
    return torch.mul(b, scaling, out=b.new_empty(b.shape, dtype=dtype))


def lora_product(
    x: Tensor, dense: Dense, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float, *, kept: Kept | None = None
) -> Tensor:
    """Gradients go to x, A and B.

    Args:
        x: [..., K] of any floating dtype, which is that of the products.
        dense: dtype -> W [N, K], the same values whenever it is called. A dequantised W lives for one product only.
        bias: [N], frozen.
        a: [r, K] fp32 (fp64 for fp64 products) masters.
        b: [N, r] likewise.
        scaling: s.
        kept: where the result is set aside, and taken from when a checkpointed block runs again.

    Returns:
        [..., N] in the dtype of x.
    """
    known = kept.take().detach() if kept is not None and kept.recomputing else None
    y, inner, low_b = _Adapted.apply(x, a, b, dense, scaling, known)
    if known is not None:
        return y
    with torch.no_grad():
        # Into the memory that the node handed out. Checkpointing stops its recomputation at the last tensor that a
        # block keeps; the node has kept its own by now, so a block's last product, a quarter of its work, is not
        # made again.
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
    """Keeps what backward needs and makes room for y."""

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
