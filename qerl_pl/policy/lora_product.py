"""A frozen linear and its LoRA update as one node of the autograd graph.

    y = x W^T + bias + s (x A^T) B^T

Letters: T tokens, K in, N out, r rank. The products of the adapter and of the base add up inside the base's matrix
product, forward and backward, so no [T, N] or [T, K] is read or written for an addition, and gradients of the fp32
master weights never pass through the compute dtype. Autograd keeps x, x A^T and the masters; W is asked for when it is
needed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Dense = Callable[[torch.dtype], Tensor]


def lora_product_reference(
    x: Tensor, dense: Dense, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float
) -> Tensor:
    """The definition; see ``lora_product``."""
    y = x @ dense(x.dtype).t() + scaling * (x @ a.to(x.dtype).t()) @ b.to(x.dtype).t()
    return y if bias is None else y + bias


def lora_product(x: Tensor, dense: Dense, bias: Tensor | None, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Gradients go to x, A and B.

    Args:
        x: [..., K] of any floating dtype, which is that of the products.
        dense: dtype -> W [N, K], the same values whenever it is called. A dequantised W lives for one product only.
        bias: [N], frozen.
        a: [r, K] fp32 (fp64 for fp64 products) masters.
        b: [N, r] likewise.
        scaling: s.

    Returns:
        [..., N] in the dtype of x.
    """
    rows = x.reshape(-1, x.shape[-1])  # [T, K]
    inner, anchor = _Save.apply(rows, a, b, dense, scaling)
    y = _Product.apply(anchor, rows.detach(), inner, dense, bias, b.detach(), scaling)
    return y.view(*x.shape[:-1], b.shape[0])


class _Save(torch.autograd.Function):
    """Keeps what backward needs, before the product is made.

    Checkpointing stops its recomputation at the last tensor that is kept. With this node ahead of the product, a
    block's last one, a quarter of its work, is not made again. The product passes its gradient on to ``anchor``.
    """

    @staticmethod
    def forward(ctx, rows: Tensor, a: Tensor, b: Tensor, dense: Dense, scaling: float) -> tuple[Tensor, Tensor]:
        inner = rows @ a.to(rows.dtype).t()  # [T, r]
        ctx.save_for_backward(rows, inner, a, b)
        ctx.dense, ctx.scaling = dense, scaling
        ctx.mark_non_differentiable(inner)
        ctx.set_materialize_grads(False)
        return inner, rows.new_empty(()).expand(len(rows), len(b))  # [T, N] in name, one element in memory

    @staticmethod
    @once_differentiable
    def backward(ctx, _: None, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        rows, inner, a, b = ctx.saved_tensors
        needs_rows, needs_a, needs_b = ctx.needs_input_grad[:3]
        d_rows = da = db = None
        d_inner = dy @ _scaled(b, ctx.scaling, dy.dtype)  # [T, r]
        if needs_rows:
            d_rows = d_inner @ a.to(dy.dtype)
            d_rows.addmm_(dy, ctx.dense(dy.dtype))
        if needs_a:
            da = _product(d_inner.t(), rows, a.dtype)
        if needs_b:
            db = _product(dy.t(), inner, b.dtype).mul_(ctx.scaling)
        return d_rows, da, db, None, None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, anchor: Tensor, rows: Tensor, inner: Tensor, dense: Dense, bias: Tensor | None, b: Tensor, scaling: float
    ) -> Tensor:
        expand = _scaled(b, scaling, rows.dtype).t()  # [r, N]
        y = inner @ expand if bias is None else torch.addmm(bias.to(rows.dtype), inner, expand)
        return y.addmm_(rows, dense(rows.dtype).t())

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, None, None, None, None, None]:
        return dy, None, None, None, None, None, None


def _scaled(b: Tensor, scaling: float, dtype: torch.dtype) -> Tensor:
    return torch.mul(b, scaling, out=b.new_empty(b.shape, dtype=dtype))  # one rounding


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    if a.is_cuda and a.dtype != dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return (a @ b).to(dtype)
