"""All experts of a mixture-of-experts layer as one node of the autograd graph, computed by grouped matrix products: the
rows of each expert are multiplied by that expert's matrices.

    y_t = sum_k w_tk z_tk,   z = h W2^T + (h A2^T) (s B2)^T,   h = silu(g) u,   (g, u) = x W13^T + (x A13^T) (s B13)^T

The terms with A and B are those of optional LoRA adapters; gate (g) and up (u) share A13. Letters: T tokens, E experts,
k experts per token, S = k T rows (one per token and chosen expert), H hidden size, I inner size, N outputs and K inputs
of a matrix, R rank, s LoRA's scaling. ``ends`` [E] has, for each expert, the index after its last row.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

Dense = Callable[[torch.dtype], Tensor]
"""Function that returns the frozen weights [E, N, K] of one linear layer (gate, up or down) of all experts in a given
dtype. It is called again for each matrix product, so dequantised weights are freed after each."""

KERNEL_RANK = 64
"""Highest rank of adapters for the Triton kernel ``add_grouped``, of which a program holds all R columns of B."""


class Routes(NamedTuple):
    """Order of S rows, one for each token and each of its experts, in which the rows of one expert are consecutive."""

    order: Tensor
    """[S] int64, each sorted row's index in the flattened expert indices [T, k]; its token is order // k."""
    inverse: Tensor
    """[T, k] int64, for each token and chosen expert the index of its sorted row."""
    ends: Tensor
    """[E] int32, index after the last row of each expert."""


class Factors(NamedTuple):
    """LoRA matrices of the linear layers of all E experts. In matrix products they are rounded to the dtype of the
    other input, as are their gradients on a GPU; autocast does the same with LoRA matrices of other linear layers."""

    gate_up_a: Tensor
    """[E, R, H], the matrix A that gate and up share. R must be a multiple of 8 on a GPU."""
    gate_up_b: Tensor
    """[E, 2I, R] times LoRA's scaling, the rows of gate and then those of up."""
    down_a: Tensor
    """[E, R, I]."""
    down_b: Tensor
    """[E, H, R] times LoRA's scaling."""


def sort_rows(ids: Tensor, num_experts: int) -> Routes:
    """Sort the S = k T pairs of a token and one of its experts by expert, and those of one expert by token, for grouped
    matrix products; returns the order and where each expert's pairs end. ``ids`` [T, k] has the indices of each token's
    k experts, from 0 to ``num_experts`` - 1."""
    experts, order = ids.flatten().sort(stable=True)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    ends = torch.searchsorted(experts, torch.arange(num_experts, device=ids.device), right=True, out_int32=True)
    return Routes(order, inverse.view(ids.shape), ends)


def grouped_experts(
    x: Tensor, weights: Tensor, routes: Routes, parts: tuple[Dense, Dense, Dense], factors: Factors | None = None
) -> Tensor:
    """Compute, for each token of x [T, H], the sum of its k experts' outputs, each times the router's weight in
    ``weights`` [T, k] fp32; returns [T, H] in the dtype of x.

    The result is differentiable with respect to x, weights and ``factors``, the experts' LoRA adapters (None: there are
    none). ``parts`` are three functions that return the frozen weights of gate, up and down; forward and backward each
    call them, so dequantised weights are not kept. Autograd keeps the outputs of gate and up and, with ``factors``,
    also x and the adapters, rounded to the dtype of x.
    """
    tensors = routes if factors is None else (*routes, *factors)
    return _GroupedExperts.apply(x, weights, parts, *tensors)


class _GroupedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Tensor, parts: Any, order: Tensor, inverse: Tensor, ends: Tensor, *factors: Tensor
    ) -> Tensor:
        low = Factors._make(factor.to(x.dtype) for factor in factors) if factors else None
        rows = x[order // weights.shape[1]]  # [S, H]
        gate, up = (grouped(rows, part(x.dtype).mT, ends) for part in parts[:2])
        if low is not None:
            inner = grouped(rows, low.gate_up_a.mT, ends)  # [S, R]
            for output, b in zip((gate, up), low.gate_up_b.chunk(2, dim=1), strict=True):
                add_grouped(output, inner, b.mT, ends)
        del rows
        product = swiglu(gate, up)
        out = grouped(product, parts[2](x.dtype).mT, ends)
        if low is not None:
            add_grouped(out, grouped(product, low.down_a.mT, ends), low.down_b.mT, ends)
        ctx.parts, ctx.master = parts, factors[0].dtype if factors else None
        ctx.save_for_backward(weights, gate, up, order, inverse, ends, *((x, *low) if low else ()))
        return summed(out, Routes(order, inverse, ends), weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), (gate_part, up_part, down_part) = grads, ctx.parts
        weights, gate, up, order, inverse, ends, *more = ctx.saved_tensors
        low = Factors._make(more[1:]) if more else None
        tokens, share = order // weights.shape[1], weights.flatten()[order].unsqueeze(1)  # [S] and [S, 1]
        d_out = dy[tokens]  # [S, H], not multiplied by the weights
        d_product = grouped(d_out, down_part(dy.dtype), ends)
        found: list[Tensor] = []  # gradients of factors
        if low is None:
            d_gate, d_up, d_share = swiglu_gradients(gate, up, d_product, share)[:3]
        else:
            d_inner = grouped(d_out, low.down_b, ends)  # [S, R]
            add_grouped(d_product, d_inner, low.down_a, ends)
            d_gate, d_up, d_share, product = swiglu_gradients(gate, up, d_product, share)
            found.append(outer((d_inner * share).to(dy.dtype), product, ends, ctx.master))
            inner = (grouped(product, low.down_a.mT, ends) * share).to(dy.dtype)
            found.append(outer(d_out, inner, ends, ctx.master))
            del product
        del d_out, d_product
        d_rows = grouped(d_gate, gate_part(dy.dtype), ends)
        d_rows += grouped(d_up, up_part(dy.dtype), ends)
        if low is not None:
            rows, (b_gate, b_up) = more[0][tokens], low.gate_up_b.chunk(2, dim=1)
            inner = grouped(rows, low.gate_up_a.mT, ends)
            d_inner = grouped(d_gate, b_gate, ends) + grouped(d_up, b_up, ends)
            add_grouped(d_rows, d_inner, low.gate_up_a, ends)
            d_b = torch.cat([outer(d_part, inner, ends, ctx.master) for d_part in (d_gate, d_up)], dim=1)
            found = [outer(d_inner, rows, ends, ctx.master), d_b, *found]
        return summed(d_rows, Routes(order, inverse, ends), None), d_share[inverse], None, None, None, None, *found


def grouped(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Multiply each of ``rows`` [S, K], which are sorted by expert, by its expert's matrix in ``matrices`` [E, K, N];
    returns [S, N] in the rows' dtype."""
    if not rows.is_cuda or rows.dtype == torch.bfloat16:
        return F.grouped_mm(rows, matrices, offs=ends)
    parts = zip(rows.tensor_split(ends[:-1].tolist()), matrices, strict=True)  # waits for the GPU
    return torch.cat([part @ matrix for part, matrix in parts])


def add_grouped(out: Tensor, rows: Tensor, matrices: Tensor, ends: Tensor) -> None:
    """Multiply ``rows`` [S, R], which are sorted by expert, each by its expert's matrix in ``matrices`` [E, R, N], and
    add the products to ``out`` [S, N] in place. On a GPU, up to R = ``KERNEL_RANK``, a Triton kernel adds each product
    in fp32 before it rounds the sum; otherwise each product is rounded first, and the sum again."""
    if rows.shape[1] <= KERNEL_RANK and (kernels := _kernels(out)):
        kernels.add_grouped(out, rows, matrices, ends)
    else:
        out += grouped(rows, matrices, ends)


def outer(left: Tensor, right: Tensor, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute left^T right for the rows of each expert, as for the gradient of its weight. The rows of ``left`` [S, N]
    and ``right`` [S, K] are sorted by expert. Returns [E, N, K] of ``dtype``, 0 for an expert without rows."""
    if not left.is_cuda or left.dtype == torch.bfloat16:
        return F.grouped_mm(left.mT, right, offs=ends).to(dtype)
    places = ends[:-1].tolist()  # waits for the GPU
    parts = zip(left.tensor_split(places), right.tensor_split(places), strict=True)
    return torch.stack([a.mT @ b for a, b in parts]).to(dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(gate) * up, [S, I] in the dtype of both; silu(gate) and the product are each rounded to it."""
    if kernels := _kernels(gate):
        return kernels.swiglu(gate, up)
    return F.silu(gate).mul_(up)


def swiglu_gradients(gate: Tensor, up: Tensor, d_product: Tensor, share: Tensor) -> tuple[Tensor, ...]:
    """Compute the backward pass of y = share * silu(gate) * up. ``gate`` and ``up`` are [S, I], ``share`` [S, 1] fp32
    is the router's weight, and ``d_product`` [S, I] the gradient of the loss with respect to y. Returns the gradients
    of gate and up, [S, I], and of share, [S] fp32, and the product silu(gate) * up. On a GPU, a kernel rounds each
    gradient once; torch's operations also round intermediate results."""
    if kernels := _kernels(gate):
        return kernels.swiglu_gradients(gate, up, d_product, share)
    activation = F.silu(gate)
    product = activation * up
    d_share = (d_product.float() * product).sum(1)
    d_product = (d_product * share).to(gate.dtype)
    return torch.ops.aten.silu_backward(d_product * up, gate), d_product * activation, d_share, product


def summed(rows: Tensor, routes: Routes, weights: Tensor | None) -> Tensor:
    """Add up, in fp32, the outputs of each token's k experts, each multiplied by the router's weight in ``weights`` [T,
    k], unless this is None. ``rows`` [S, N] has one output per token and chosen expert, sorted by expert; ``routes``
    says which rows belong to which token. Returns [T, N] in the rows' dtype."""
    if not torch.is_grad_enabled() and (kernels := _kernels(rows)):  # the kernel has no backward
        return kernels.summed(rows, routes.inverse, weights)
    total = torch.zeros(len(routes.inverse), rows.shape[1], device=rows.device)
    for number, places in enumerate(routes.inverse.unbind(1)):
        part = rows[places]
        total += part if weights is None else (part * weights[:, number, None]).to(rows.dtype)
    return total.to(rows.dtype)


def _kernels(rows: Tensor) -> ModuleType | None:
    """Return the Triton kernels for experts, or None where torch's operations are used: on a CPU, and for float64."""
    if not rows.is_cuda or rows.dtype == torch.float64:
        return None
    from qerl_pl.kernels import experts  # needs Triton

    return experts
