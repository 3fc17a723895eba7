"""Triton kernel that adds LoRA adapters to the outputs of the experts of an MoE layer; used in rollouts for few rows.

A row is a token together with one of the k experts chosen for it. Each thread block computes some of the outputs for
the rows of one expert. It finds these rows in the indices of the chosen experts, so no other kernel has to sort rows
before, and it reads the expert's matrices once for 16 rows, whereas one thread block per row would read them for every
row. Letters: T tokens, k experts per token, S = T k rows, E experts, K inputs, N outputs, of which each slice (gate or
up) has n, R rank.
"""

# pyright: reportCallIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
# Triton's type hints do not have its launch options, scalars and tensors.
from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from qerl_pl.kernels.launching import dot_size, has_pdl, launch, pdl_options

SCANNED, FEW_SCANNED = 1024, 128  # largest numbers of ids that a thread block reads; the kernel is compiled for both
MOST_ROWS, MOST_PER_EXPERT = 4 * SCANNED, 32
"""Largest numbers of rows for which this kernel is used, in all and on average per expert.

This kernel reads an expert's matrices once for each ``SCANNED`` rows and, within these, for each ``BLOCK_T`` rows of
the expert; kernels that sort the rows first read them once for up to 64 rows of the expert. For example, in 16 bits the
matrices of rank 8 of gate and up, for 128 experts with 2048 inputs and 768 outputs each, have 11.5 MB. The L2 cache of
an H100 delivers four times as much in about 10 us, which is about what the kernels that sort rows take, so sorting is
worth it for more rows.
"""
MOST_RANK = 64  # of this kernel; larger tiles of A do not fit in shared memory
PROGRAMS = 256  # wanted number of thread blocks that have rows: two for each SM, as many as run at the same time
WARPS, STAGES = 8, 4  # the warps of a thread block share the sum over K; more stages keep more loads in flight
BLOCK_T, BLOCK_N = 16, 128  # rows (the fewest that tensor cores multiply) and outputs that are computed at a time


def is_faster(ids: Tensor, a: Tensor) -> bool:
    """Return whether ``add_lora`` is expected to be faster than vLLM's kernels, which first sort the rows by expert,
    for the experts ``ids`` [T, k] of each token and the matrices ``a`` [E, R, K]."""
    num_experts, rank, _ = a.shape
    return rank <= MOST_RANK and ids.numel() <= min(MOST_ROWS, MOST_PER_EXPERT * num_experts)


def add_lora(
    y: Tensor,
    x: Tensor,
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    indices: Tensor,
    enabled: Tensor,
    ids: Tensor,
    weights: Tensor | None = None,
) -> None:
    """Add the LoRA adapters of experts: w (x A^T) B^T is added to each row of y, where A and B are the matrices of the
    row's expert and w is the row's factor, from ``weights``. A row is a token together with one of its k experts. If y
    holds the outputs of gate and of up side by side, each of the two is a slice with its own A and B; otherwise there
    is one slice. Rows of tokens without the adapter are not changed, nor are rows whose expert's index is negative or
    at least E.

    Sums are fp32. x A^T is rounded to the dtype of y, and so is w (x A^T) B^T before it is added to y; the trainer and
    vLLM's kernel round in the same places.

    Args:
        y: [S, N], the rows of a token following each other; written in place.
        x: [T, K] or [S, K] of the dtype of y, the input of each token or of each row.
        a: the matrices A of all experts, one tensor [E, R, K] for each slice.
        b: the matrices B, one tensor [E, n, R] for each slice; all slices have the same number n of outputs.
        indices: [T] or longer, integers: 0 for a token with the adapter, -1 for one without.
        enabled: [1] or longer, integers; if the first is 0, nothing is added.
        ids: [T, k] integers, experts of each token.
        weights: [T, k], the factor w of each row; None means 1.
    """
    (num_tokens, chosen), (num_experts, rank, K), width = ids.shape, a[0].shape, b[0].shape[1]
    num_rows = num_tokens * chosen
    assert len(a) == len(b) <= 2, len(a)
    assert {matrix.dtype for matrix in (y, x, *a, *b)} == {y.dtype}, [matrix.dtype for matrix in (y, x, *a, *b)]
    assert all(matrix.is_contiguous() for matrix in (ids, *a, *b, *([] if weights is None else [weights])))
    assert y.shape == (num_rows, len(a) * width), (y.shape, num_rows, width)
    assert x.shape in {(num_tokens, K), (num_rows, K)}, (x.shape, num_tokens, chosen, K)
    assert y.stride(1) == x.stride(1) == 1, (y.stride(), x.stride())
    if not num_rows:
        return
    block_r, block_s = dot_size(rank), FEW_SCANNED if num_rows <= FEW_SCANNED else SCANNED
    parts = max(1, PROGRAMS // (len(a) * min(num_experts, num_rows)))
    steps = triton.cdiv(width, BLOCK_N * parts)
    grid = num_experts, len(a) * triton.cdiv(width, BLOCK_N * steps), triton.cdiv(num_rows, block_s)
    constants = {"RANK": rank, "CHOSEN": chosen, "PER_TOKEN": len(x) == num_tokens, "WEIGHTED": weights is not None}
    constants |= {"BLOCK_S": block_s, "BLOCK_T": BLOCK_T, "BLOCK_R": block_r, "BLOCK_N": BLOCK_N}
    constants |= {"SPLITS": WARPS, "BLOCK_K": max(16, 512 // block_r), "PDL": has_pdl(y)}
    arguments = y, x, a[0], a[-1], b[0], b[-1], ids, indices, enabled, y if weights is None else weights
    sizes = num_rows, K, width, steps, y.stride(0), x.stride(0)
    # one stage fewer of tiles in fp32, which are twice as large, fits in the shared memory of any GPU
    options = {"num_warps": WARPS, "num_stages": STAGES - (y.element_size() > 2), **pdl_options(y)}
    launch(_add_lora_kernel, grid, (*arguments, *sizes), constants, **options)


@triton.jit(do_not_specialize=["num_rows", "steps"])
def _add_lora_kernel(
    y,
    x,
    a0,
    a1,
    b0,
    b1,
    ids,
    indices,
    enabled,
    weights,
    num_rows,
    K,
    width,
    steps,
    y_stride,
    x_stride,
    RANK: tl.constexpr,
    CHOSEN: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    expert, parts = tl.program_id(0), (width + steps * BLOCK_N - 1) // (steps * BLOCK_N)
    slice = tl.program_id(1) // parts
    a = tl.where(slice == 0, a0, a1) + expert.to(tl.int64) * RANK * K
    b = tl.where(slice == 0, b0, b1) + expert.to(tl.int64) * RANK * width
    r = tl.arange(0, BLOCK_R)
    if PDL:
        tl.extra.cuda.gdc_wait()  # the previous kernel of the stream may have written anything that is read here
    s = tl.program_id(2) * BLOCK_S + tl.arange(0, BLOCK_S)
    chosen = tl.load(ids + s, mask=s < num_rows, other=-1)
    adapter = tl.load(indices + s // CHOSEN, mask=s < num_rows, other=-1)
    found = ((chosen == expert) & (adapter >= 0) & (tl.load(enabled) != 0)).to(tl.int32)
    number = tl.associative_scan(found, 0, tl.standard._sum_combine)  # 1 for the first row of this expert
    count = tl.reduce(found, 0, tl.standard._sum_combine)
    for first in range(0, count, BLOCK_T):
        wanted = first + 1 + tl.arange(0, BLOCK_T)
        # [BLOCK_T]: the index of the n-th row of this expert is the number of rows up to which there are fewer than n
        before = (number[None, :] < wanted[:, None]).to(tl.int32)
        row = tl.program_id(2) * BLOCK_S + tl.reduce(before, 1, tl.standard._sum_combine)
        in_rows = (wanted <= count)[:, None]
        x_rows = x + (row // CHOSEN if PER_TOKEN else row).to(tl.int64) * x_stride
        # Each warp computes a product of its own, over a part of K. Warps that shared the products would all read the
        # same operands, and a warp waits for the end of each product before it starts the next one.
        split = tl.arange(0, SPLITS)[:, None]
        total = tl.full([SPLITS, BLOCK_T, BLOCK_R], 0.0, tl.float32)
        for start in range(0, K, SPLITS * BLOCK_K):
            k = start + split * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
            x_tile = tl.load(
                x_rows[None, :, None] + k[:, None, :], mask=in_rows[None, :, :] & (k < K)[:, None, :], other=0.0
            )
            a_tile = tl.load(
                a + r[None, None, :] * K + k[:, :, None],
                mask=(r < RANK)[None, None, :] & (k < K)[:, :, None],
                other=0.0,
            )
            total = tl.dot(x_tile, a_tile, total, input_precision="ieee")
        hidden = tl.reduce(total, 0, tl.standard._sum_combine).to(y.dtype.element_ty)
        y_rows = y + row[:, None].to(tl.int64) * y_stride + slice * width
        if WEIGHTED:
            weight = tl.load(weights + row, mask=wanted <= count, other=0.0).to(tl.float32)
        for step in tl.range(0, steps, num_stages=3):
            n = (tl.program_id(1) % parts * steps + step) * BLOCK_N + tl.arange(0, BLOCK_N)
            inside = in_rows & (n < width)[None, :]
            old = tl.load(y_rows + n[None, :], mask=inside, other=0.0)
            b_tile = tl.load(
                b + n[None, :] * RANK + r[:, None], mask=(r < RANK)[:, None] & (n < width)[None, :], other=0.0
            )
            update = tl.dot(hidden, b_tile, input_precision="ieee")
            if WEIGHTED:
                update *= weight[:, None]
            total_y = old.to(tl.float32) + update.to(y.dtype.element_ty).to(tl.float32)
            tl.store(y_rows + n[None, :], total_y.to(y.dtype.element_ty), mask=inside)
