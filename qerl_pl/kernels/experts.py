"""Triton kernels for the element-wise work of a mixture-of-experts (MoE) layer and for its LoRA adapters, each in one
pass over its tensors; ``qerl_pl.quant.grouped`` defines their results in plain PyTorch. Letters: T tokens, k experts
per token, S = k T rows sorted by expert (one per token and chosen expert), E experts, I inner size of an expert, N
columns, R rank of a LoRA adapter."""

# pyright: reportCallIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
# Triton's type hints do not have its launch options, scalars and static_range.
import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl_pl.kernels.launching import dot_size, launch

BLOCK, WARPS = 1024, 4  # columns and warps per program: each thread loads 16 bytes per row of a 16-bit dtype
TILE = 64, 64  # rows and columns per program of ``add_grouped``, powers of 2, at least 16


def summed(rows: Tensor, inverse: Tensor, weights: Tensor | None) -> Tensor:
    """Add up the outputs of the k experts of each of T tokens, to [T, N]. The outputs are multiplied by ``weights`` [T,
    k] if these are given. ``rows`` [T k, N] are sorted by expert; ``inverse`` [T, k] int64 has the indices of each
    token's rows; both are contiguous. The result equals ``grouped.summed`` bit for bit."""
    assert rows.is_contiguous(), rows.stride()
    assert inverse.is_contiguous(), inverse.stride()
    (tokens, chosen), width = inverse.shape, rows.shape[1]
    out = rows.new_empty(tokens, width)
    arguments = rows, inverse, rows if weights is None else weights.contiguous(), out, width
    constants = {"CHOSEN": chosen, "WEIGHTED": weights is not None, "BLOCK": BLOCK}
    grid = tokens, triton.cdiv(width, BLOCK)
    # A product of fp32 rows is rounded before it is added, as by two kernels of torch.
    launch(_sum_kernel, grid, arguments, constants, num_warps=WARPS, enable_fp_fusion=False)
    return out


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute silu(gate) * up of contiguous tensors of equal shape and dtype; silu(gate) and the product are each
    rounded to this dtype."""
    assert gate.is_contiguous(), gate.stride()
    assert up.is_contiguous(), up.stride()
    product = torch.empty_like(gate)
    grid = (triton.cdiv(gate.numel(), BLOCK),)
    launch(_swiglu_kernel, grid, (gate, up, product, gate.numel()), {"BLOCK": BLOCK}, num_warps=WARPS)
    return product


def swiglu_gradients(gate: Tensor, up: Tensor, d_product: Tensor, share: Tensor) -> tuple[Tensor, ...]:
    """Compute the backward pass of y = share * silu(gate) * up, with a factor ``share`` of each row and ``d_product``,
    the gradient of the loss with respect to y, all contiguous. Returns the gradients with respect to gate, up and
    share, and the product silu(gate) * up. ``grouped.swiglu_gradients`` computes the same in plain PyTorch."""
    tensors = gate, up, d_product, share
    assert all(tensor.is_contiguous() for tensor in tensors), [tensor.stride() for tensor in tensors]
    d_gate, d_up, product = (torch.empty_like(gate) for _ in range(3))
    d_share = torch.empty(len(gate), dtype=torch.float32, device=gate.device)
    arguments = *tensors, d_gate, d_up, d_share, product, gate.shape[1]
    launch(_swiglu_gradient_kernel, (len(gate),), arguments, {"BLOCK": BLOCK}, num_warps=WARPS)
    return d_gate, d_up, d_share, product


def add_grouped(out: Tensor, rows: Tensor, matrices: Tensor, ends: Tensor) -> None:
    """Add to ``out`` [S, N], in place, the product of each row of ``rows`` [S, R] and the matrix of the row's expert in
    ``matrices`` [E, R, N]. Rows are sorted by expert, and ``ends`` [E] int32 has the index after each expert's last
    row. ``out`` and ``rows`` are contiguous; ``matrices`` may have any strides. Sums are fp32 and rounded once."""
    assert out.is_contiguous(), out.stride()
    assert rows.is_contiguous(), rows.stride()
    (size, width), (experts, rank, _), strides = out.shape, matrices.shape, matrices.stride()
    assert max(rows.numel(), experts * strides[0]) < 2**31, "only the offsets in out have 64 bits"
    constants = {"EXPERTS": experts, "RANK": rank, "BLOCK_E": triton.next_power_of_2(experts)}
    constants |= {"BLOCK_R": dot_size(rank), "BLOCK_S": TILE[0], "BLOCK_N": TILE[1]}
    grid = (triton.cdiv(size, TILE[0]) * triton.cdiv(width, TILE[1]),)
    launch(_add_kernel, grid, (out, rows, matrices, ends, size, width, *strides), constants, num_warps=WARPS)


@triton.jit
def _sum_kernel(rows, inverse, weights, out, width, CHOSEN: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.full([BLOCK], 0.0, tl.float32)
    for choice in tl.static_range(CHOSEN):  # unrolled, so that all rows are loaded at once
        place = tl.load(inverse + token * CHOSEN + choice)
        part = tl.load(rows + place * width + column, mask=inside, other=0.0)
        if WEIGHTED:
            weight = tl.load(weights + token * CHOSEN + choice).to(tl.float32)
            part = (part.to(tl.float32) * weight).to(rows.dtype.element_ty)
        total += part.to(tl.float32)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_kernel(gate, up, product, size, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    g = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
    activation = (g / (1 + tl.exp(-g))).to(gate.dtype.element_ty).to(tl.float32)
    tl.store(product + place, (activation * u).to(product.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_gradient_kernel(gate, up, d_product, share, d_gate, d_up, d_share, product, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = gate.dtype.element_ty
    factor = tl.load(share + row)
    total = tl.full([BLOCK], 0.0, tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside, place = column < width, row * width + column
        g = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(d_product + place, mask=inside, other=0.0).to(tl.float32)
        sigmoid = 1 / (1 + tl.exp(-g))
        # Activation and product are those of forward, with its roundings. The gradients are rounded once.
        activation = (g / (1 + tl.exp(-g))).to(dtype).to(tl.float32)
        computed = (activation * u).to(dtype)
        tl.store(product + place, computed, mask=inside)
        total += d * computed.to(tl.float32)
        d *= factor
        tl.store(d_up + place, (d * activation).to(dtype), mask=inside)
        tl.store(d_gate + place, (d * u * sigmoid * (1 + g * (1 - sigmoid))).to(dtype), mask=inside)
    tl.store(d_share + row, tl.reduce(total, 0, tl.standard._sum_combine))  # Triton's interpreter has no tl.sum


@triton.jit
def _add_kernel(
    out,
    rows,
    matrices,
    ends,
    size,
    width,
    expert_stride,
    rank_stride,
    column_stride,
    EXPERTS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    blocks = (width + BLOCK_N - 1) // BLOCK_N
    start = tl.program_id(0) // blocks * BLOCK_S
    s, n = start + tl.arange(0, BLOCK_S), tl.program_id(0) % blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    r, e = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_E)
    place = out + s.to(tl.int64)[:, None] * width + n[None, :]
    inside = (s < size)[:, None] & (n < width)[None, :]
    total = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(rows + s[:, None] * RANK + r[None, :], mask=(s < size)[:, None] & (r < RANK)[None, :], other=0.0)
    # The expert of a row is the number of experts whose rows end before it.
    end = tl.load(ends + e, mask=e < EXPERTS, other=size)
    first = tl.reduce((end <= start).to(tl.int32), 0, tl.standard._sum_combine)
    last = tl.reduce((end < tl.minimum(start + BLOCK_S, size)).to(tl.int32), 0, tl.standard._sum_combine)
    begin = start
    for expert in range(first, last + 1):
        stop = tl.load(ends + expert)
        x_tile = tl.where(((s >= begin) & (s < stop))[:, None], x, 0.0)
        begin = stop
        matrix = matrices + expert * expert_stride + r[:, None] * rank_stride + n[None, :] * column_stride
        tile = tl.load(matrix, mask=(r < RANK)[:, None] & (n < width)[None, :], other=0.0)
        total = tl.dot(x_tile, tile, total, input_precision="ieee")
    tl.store(place, total.to(out.dtype.element_ty), mask=inside)
