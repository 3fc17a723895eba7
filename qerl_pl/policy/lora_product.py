"""Frozen linear layer and its LoRA adapter as one node of the autograd graph.

    y = x W^T + bias + (x A^T) (s B)^T

Linear layers with the same input x, such as q_proj, k_proj and v_proj, may share one node. Letters: T tokens, K inputs,
N outputs, r rank, s the scale alpha / r.

The product s B is computed in fp32 and then rounded to the compute dtype (``scaled``), as in the rollout engines.
Rounding B before the multiplication would give other values, unless s is a power of two. The adapter's term is computed
first, and the matrix product with W adds to it in place (beta = 1), so no [T, N] or [T, K] tensor is read or written
only for an addition. Gradients of the fp32 master weights are never rounded to the compute dtype. Autograd keeps x, x
A^T, A and s B in the compute dtype; W is dequantised again in backward. With few tokens, most of the time goes to
launching kernels from the CPU, so there is one autograd node with as few operations as possible.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qerl_pl.policy.kept import Kept

Dense = Callable[[torch.dtype], Tensor]


def scaled(b: Tensor, scaling: float, dtype: torch.dtype) -> Tensor:
    """Return s B, the scaled fp32 master weights B of LoRA, rounded once to ``dtype``."""
    return torch.mul(b, scaling, out=b.new_empty(b.shape, dtype=dtype))


class Adapted(NamedTuple):
    """Frozen weight of one linear and its LoRA adapter, an argument of ``lora_products``."""

    dense: Dense
    """Function that returns the frozen weight W [N, K] in a given dtype, always with the same values. It is called for
    each matrix product, so a dequantised W exists only during one product."""
    bias: Tensor | None
    """[N], frozen."""
    a: Tensor
    """[r, K] fp32 (fp64 for fp64 products), the master weights of A."""
    b: Tensor
    """[N, r] of the same dtype, the master weights of B."""
    scaling: float
    """s."""
    kept: Kept | None = None
    """Storage of selective gradient checkpointing: the layer's output y is stored there in forward, and read from there
    when backward recomputes the block. None: y is not stored."""


def lora_product(x: Tensor, adapted: Adapted) -> Tensor:
    """Compute ``lora_products`` for one linear layer: [..., N] in the dtype of x [..., K], in which the products are
    computed, differentiable with respect to x, A and B."""
    (y,) = lora_products(x, [adapted])
    return y


def lora_products(x: Tensor, linears: Sequence[Adapted]) -> tuple[Tensor, ...]:
    """Compute y = x W^T + bias + (x A^T) (s B)^T for several frozen linear layers W with LoRA adapters A, B of scale s
    and the same input x [..., K], as one node of the autograd graph; returns [..., N] for each layer.

    The matrices A are concatenated, so x is read once for all of them, in forward and for their gradients. The gradient
    of x is the sum over the layers; each layer's matrix product adds to it in place.
    """
    known = tuple(
        linear.kept.take().detach() if linear.kept and linear.kept.recomputing else None for linear in linears
    )
    masters = [master for linear in linears for master in (linear.a, linear.b)]
    weights = tuple((linear.dense, linear.scaling) for linear in linears)
    outputs = _Adapted.apply(x, weights, known, *masters)
    ys, inner, low_b = outputs[: len(linears)], outputs[len(linears)], outputs[len(linears) + 1 :]
    with torch.no_grad():
        # The products are written to the memory that the autograd node allocated, after the node has saved its tensors.
        # torch.utils.checkpoint stops recomputing a block at the last tensor that the block saves, so the product of a
        # block's last linear, a quarter of the block's work, is not recomputed.
        rows = x.reshape(-1, x.shape[-1])  # [T, K]
        inners = inner.split([low.shape[1] for low in low_b], dim=1)
        for linear, done, y, part, low in zip(linears, known, ys, inners, low_b, strict=True):
            if done is not None:
                continue
            out = y.view(-1, y.shape[-1])  # [T, N]
            if linear.bias is None:
                torch.mm(part, low.t(), out=out)
            else:
                torch.addmm(linear.bias.to(x.dtype), part, low.t(), out=out)
            out.addmm_(rows, linear.dense(x.dtype).t())
    for linear, done, y in zip(linears, known, ys, strict=True):
        if linear.kept is not None and done is None:
            linear.kept.put(y)
    return ys


class _Adapted(torch.autograd.Function):
    """Autograd node of ``lora_products``, which allocates the outputs, to be written later."""

    @staticmethod
    def forward(
        ctx, x: Tensor, weights: tuple[tuple[Dense, float], ...], known: tuple[Tensor | None, ...], *masters: Tensor
    ) -> tuple[Tensor, ...]:
        a, b = masters[::2], masters[1::2]
        low_a = (a[0] if len(a) == 1 else torch.cat(a)).to(x.dtype)  # [R, K], R the sum of the ranks
        low_b = [scaled(master_b, scaling, x.dtype) for master_b, (_, scaling) in zip(b, weights, strict=True)]
        inner = torch.mm(x.reshape(-1, x.shape[-1]), low_a.t())  # [T, R]
        ctx.save_for_backward(x, inner, low_a, *low_b)
        ctx.weights, ctx.master = weights, a[0].dtype
        ctx.mark_non_differentiable(inner, *low_b)
        ctx.set_materialize_grads(False)
        ys = [
            x.new_empty(*x.shape[:-1], len(low)) if done is None else done
            for low, done in zip(low_b, known, strict=True)
        ]
        return *ys, inner, *low_b

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, inner, low_a, *low_b = ctx.saved_tensors
        rows = x.reshape(-1, x.shape[-1])  # [T, K]
        ranks = [low.shape[1] for low in low_b]
        dys = [
            rows.new_zeros(len(rows), len(low)) if dy is None else dy.reshape(-1, len(low))
            for dy, low in zip(grads, low_b, strict=False)  # the remaining gradients are of inner and low_b
        ]
        d_inners = [torch.mm(dy, low) for dy, low in zip(dys, low_b, strict=True)]  # [T, r] each
        d_inner = d_inners[0] if len(ranks) == 1 else torch.cat(d_inners, dim=1)  # [T, R]
        da = _product(d_inner.t(), rows, ctx.master).split(ranks)
        db = [
            _product(dy.t(), part, ctx.master) for dy, part in zip(dys, inner.split(ranks, dim=1), strict=True)
        ]  # [N, r] each
        dx = torch.mm(d_inner, low_a) if ctx.needs_input_grad[0] else None
        for dy, master_gradient, (dense, scaling) in zip(dys, db, ctx.weights, strict=True):
            if scaling != 1:
                master_gradient.mul_(scaling)
            if dx is not None:
                dx.addmm_(dy, dense(dy.dtype))
        masters = [gradient for pair in zip(da, db, strict=True) for gradient in pair]
        return None if dx is None else dx.view(x.shape), None, None, *masters


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    if a.is_cuda and a.dtype != dtype:
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a, b).to(dtype)
