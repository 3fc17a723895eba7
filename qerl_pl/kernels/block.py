"""What a transformer block does between its linears: RMSNorm with the residual before it, and the gate of its MLP.

A compiler makes such kernels as well, but none that is launched early (``launch``), nor one that lets the linear after
it start to fetch its weights. T tokens, H hidden size, I intermediate size.
"""

# pyright: reportCallIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
# Triton's launch options and scalars are not in its type hints.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from qerl_pl.kernels.launch import launch_options

GATE_BLOCK = 1024


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight (arXiv 1910.07467, eq. 4): the quotient is rounded, then the product.

    Args:
        x: [..., H]; its rows may lie apart, all at the same distance.
        weight: [H] of the same dtype, contiguous.
        epsilon: of the mean square.

    Returns:
        [..., H] of the same dtype, contiguous.
    """
    return _norm(x, None, weight, epsilon)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """``rms_norm`` of x + residual, whose sum is rounded only where it is returned.

    Args:
        x: as for ``rms_norm``.
        residual: of its shape and dtype.
        weight: as for ``rms_norm``.
        epsilon: as for ``rms_norm``.

    Returns:
        The norm and the sum, both of x's shape and dtype, contiguous.
    """
    return _norm(x, residual, weight, epsilon)


def silu_and_mul(x: Tensor) -> Tensor:
    """silu(gate) * up (SwiGLU, arXiv 2002.05202, eq. 6), rounded once.

    Args:
        x: [..., 2 I], gate and up side by side; its rows may lie apart, all at the same distance.

    Returns:
        [..., I] of the same dtype, contiguous.
    """
    rows = x.reshape(-1, x.shape[-1])
    assert rows.stride(1) == 1, x.stride()
    width = x.shape[-1] // 2
    out = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device)
    if len(rows):
        grid = triton.cdiv(width, GATE_BLOCK), len(rows)
        _gate_kernel[grid](rows, out, rows.stride(0), WIDTH=width, BLOCK=GATE_BLOCK, **launch_options(x, 4))
    return out


def rms_norm_reference(x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The norm and what was normed, in fp64 and without roundings, row by row."""
    total = (x if residual is None else x.double() + residual.double()).double()
    rows = [row / (row.square().mean() + epsilon).sqrt() * weight.double() for row in total.reshape(-1, x.shape[-1])]
    return torch.stack(rows).reshape(x.shape), total


def silu_and_mul_reference(x: Tensor) -> Tensor:
    """[..., I] fp64."""
    gate, up = x.double().chunk(2, dim=-1)
    return F.silu(gate) * up


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    H = x.shape[-1]
    rows, others = x.reshape(-1, H), (x if residual is None else residual).reshape(-1, H)
    assert rows.stride(1) == others.stride(1) == 1, (x.stride(), others.stride())
    assert weight.is_contiguous(), weight.stride()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = out if residual is None else torch.empty_like(out)
    block = triton.next_power_of_2(H)
    if len(rows):
        _norm_kernel[(len(rows),)](
            rows,
            others,
            weight,
            out,
            total,
            epsilon,
            rows.stride(0),
            others.stride(0),
            H=H,
            BLOCK=block,
            ADD=residual is not None,
            **launch_options(x, min(max(block // 512, 1), 16)),
        )
    return out, total


@triton.jit
def _norm_kernel(
    x,
    residual,
    weight,
    out,
    total,
    epsilon,
    x_stride,
    residual_stride,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    EARLY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK)
    inside = h < H
    scale = tl.load(weight + h, mask=inside, other=0.0).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    values = tl.load(x + row * x_stride + h, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(residual + row * residual_stride + h, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + row * H + h, values.to(total.dtype.element_ty), mask=inside)
    square = tl.reduce(values * values, 0, tl.standard._sum_combine) / H  # tl.sum itself may not be interpreted
    normed = (values * (1 / tl.sqrt(square + epsilon))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * H + h, (normed * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate_kernel(x, out, x_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = n < WIDTH
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    gate = tl.load(x + row * x_stride + n, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + WIDTH + n, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + n, (gate / (1 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=inside)
