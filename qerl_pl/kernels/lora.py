"""y += (x A^T) B^T for one adapter and few tokens: what a decoding step adds to each linear.

A linear that vLLM fused (q/k/v, gate/up) has up to three slices of its output, each with an A and a B of its own, and
one launch serves them all. The matrices are small (1 MB where the base has 70), so time goes into latency, not work:
``shrink`` splits K over the whole GPU and writes one fp32 sum a split, ``expand`` adds the splits up in a fixed order
(no atomics: equal inputs give equal bits) and starts to load B while ``shrink`` is still running (programmatic
dependent launch). Where there is more work than that, many tokens or a high rank, cuBLAS is faster.

Block sizes follow a written rule, as nothing may be tried out while a CUDA graph is captured. They are powers of 2, or
made of some: each one that is new is compiled, which takes longer than the whole rollout in which that would happen.
T tokens, K inputs, N outputs of which a slice has n, R rank.
"""

# pyright: reportCallIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false
# Triton's launch options, scalars and static_range are not in its type hints.
from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

MATMUL_TOKENS, MATMUL_RANK = 1024, 128  # from here on cuBLAS
PROGRAMS = 128  # about one for each multiprocessor
EXPAND_TOKENS = 16  # of a program of expand: with more, it would have to hold more sums or get fewer splits
EXPAND_SUMS = 2**14  # partial sums that a program of expand holds in its registers
MOST_STEPS = 8  # of a program of expand, which are compiled one by one


class ShrinkBlocks(NamedTuple):
    """What a program of ``shrink`` works on; all but ``chunk`` are powers of 2, at least 16."""

    tokens: int
    rank: int
    depth: int
    """Of K, at a time."""
    chunk: int
    """Of K, in all: a multiple of depth. There are ceil(K / chunk) splits."""
    warps: int = 4
    stages: int = 3


class ExpandBlocks(NamedTuple):
    """What a program of ``expand`` works on; tokens and columns are powers of 2, at least 16."""

    tokens: int
    columns: int
    """Of N, at a time."""
    steps: int
    """So many times, one after another: sums over splits are read once for all of them. A power of 2 by the rule."""
    warps: int = 4


def shrink_blocks(num_tokens: int, K: int, rank: int, num_slices: int) -> ShrinkBlocks:
    """Enough splits to occupy the GPU, and few enough that ``expand`` does not spend its time on adding them up."""
    tokens = min(_power_of_2(num_tokens), 64)
    block_rank = min(_power_of_2(rank), 64)
    depth = 128
    tiles = triton.cdiv(num_tokens, tokens) * triton.cdiv(rank, block_rank) * num_slices
    most = min(32, EXPAND_SUMS // (EXPAND_TOKENS * _power_of_2(rank)))
    splits = _power_of_2_below(min(PROGRAMS // tiles, most))
    chunk = depth * triton.cdiv(K, depth * splits)
    return ShrinkBlocks(tokens, block_rank, depth, chunk)


def expand_blocks(num_tokens: int, widths: Sequence[int]) -> ExpandBlocks:
    """Four programs or a few more for each multiprocessor, as far as the widths allow; more of them for many tokens."""
    per_program = triton.cdiv(sum(widths) * triton.cdiv(num_tokens, EXPAND_TOKENS), 4 * PROGRAMS)
    columns = min(_power_of_2(per_program), 128)
    return ExpandBlocks(EXPAND_TOKENS, columns, min(_power_of_2_below(per_program // columns), MOST_STEPS))


def token_counts(K: int, widths: Sequence[int], rank: int, *, fewest: int = 1) -> list[int]:
    """Numbers of tokens, from the fewest on, at which ``add_lora`` has run every kernel that it may need for them."""
    first: dict[tuple[ShrinkBlocks, ExpandBlocks], int] = {}
    for count in range(fewest, MATMUL_TOKENS):
        first.setdefault((shrink_blocks(count, K, rank, len(widths)), expand_blocks(count, widths)), count)
    return list(first.values())


def add_lora(y: Tensor, x: Tensor, a: Sequence[Tensor], b: Sequence[Tensor], indices: Tensor) -> None:
    """Add the adapter's product to the rows of y whose index is not negative; the others keep every bit.

    The sums are fp32. x A^T is rounded to x's dtype in between, and y once.

    Args:
        y: [T, N], in place; rows may lie apart.
        x: [T, K] of the same dtype; rows may lie apart.
        a: one [R, K] for each slice, at most three.
        b: one [n, R] for each slice; together they have N rows.
        indices: [T] or longer, int64: 0 with the adapter, -1 without.
    """
    if not len(x):
        return
    if is_matmul_faster(x, a):
        add_lora_by_matmul(y, x, a, b, indices)
    else:
        expand(y, shrink(x, a), b, indices)


def is_matmul_faster(x: Tensor, a: Sequence[Tensor]) -> bool:
    """Whether ``add_lora`` leaves the work to cuBLAS; fp32, for which there are no tensor cores, always."""
    return len(x) >= MATMUL_TOKENS or len(a[0]) >= MATMUL_RANK or x.dtype == torch.float32


def add_lora_by_matmul(y: Tensor, x: Tensor, a: Sequence[Tensor], b: Sequence[Tensor], indices: Tensor) -> None:
    """The same by cuBLAS, two calls a slice. Rows without the adapter must not hold NaN or infinity in x."""
    with_adapter = (indices[: len(x)] >= 0).unsqueeze(1)
    widths = [len(matrix) for matrix in b]
    for part, first, second in zip(y.split(widths, dim=1), a, b, strict=True):
        part.addmm_(F.linear(x, first) * with_adapter, second.t())


def add_lora_reference(y: Tensor, x: Tensor, a: Sequence[Tensor], b: Sequence[Tensor], indices: Tensor) -> Tensor:
    """[T, N] fp64, row by row: slow, on any device, and the definition that the kernels are held to."""
    out = y.double()
    for row in (indices[: len(x)] >= 0).nonzero().flatten().tolist():
        update = [second.double() @ (first.double() @ x[row].double()) for first, second in zip(a, b, strict=True)]
        out[row] += torch.cat(update)
    return out


def shrink(x: Tensor, a: Sequence[Tensor], blocks: ShrinkBlocks | None = None, *, early: bool = True) -> Tensor:
    """x A^T in parts that add up to it.

    Args:
        x: [T, K]; rows may lie apart.
        a: one [R, K] for each slice, contiguous.
        blocks: None follows the rule.
        early: where the GPU can, start before the kernel that was launched last has ended.

    Returns:
        [slices, splits, T, R] fp32.
    """
    assert x.stride(1) == 1, x.stride()
    assert all(matrix.is_contiguous() for matrix in a), [matrix.stride() for matrix in a]
    (num_tokens, K), rank = x.shape, len(a[0])
    blocks = blocks or shrink_blocks(num_tokens, K, rank, len(a))
    splits = triton.cdiv(K, blocks.chunk)
    partials = torch.empty(len(a), splits, num_tokens, rank, dtype=torch.float32, device=x.device)
    grid = splits, len(a) * triton.cdiv(rank, blocks.rank), triton.cdiv(num_tokens, blocks.tokens)
    _shrink_kernel[grid](
        x,
        *_three(a),
        partials,
        num_tokens,
        K,
        x.stride(0),
        RANK=rank,
        CHUNK=blocks.chunk,
        BLOCK_T=blocks.tokens,
        BLOCK_R=blocks.rank,
        BLOCK_K=blocks.depth,
        num_stages=blocks.stages,
        **_options(x, blocks.warps, early=early),
    )
    return partials


def expand(
    y: Tensor,
    partials: Tensor,
    b: Sequence[Tensor],
    indices: Tensor,
    blocks: ExpandBlocks | None = None,
    *,
    early: bool = True,
) -> None:
    """Add B times the sum of the partials to the rows of y whose index is not negative.

    Args:
        y: [T, N], in place; rows may lie apart.
        partials: [slices, splits, T, R] of ``shrink``, which must be the kernel that was launched last if ``early``.
        b: one [n, R] for each slice, contiguous.
        indices: [T] or longer, int64.
        blocks: None follows the rule.
        early: where the GPU can, start before ``shrink`` has ended, and wait for it with B at hand.
    """
    assert y.stride(1) == 1, y.stride()
    assert all(matrix.is_contiguous() for matrix in b), [matrix.stride() for matrix in b]
    _, splits, num_tokens, rank = partials.shape
    widths = [len(matrix) for matrix in b]
    blocks = blocks or expand_blocks(num_tokens, widths)
    columns = blocks.columns * blocks.steps
    grid = sum(triton.cdiv(width, columns) for width in widths), triton.cdiv(num_tokens, blocks.tokens)
    _expand_kernel[grid](
        y,
        partials,
        *_three(b),
        indices,
        num_tokens,
        *(widths + [0, 0])[:3],
        y.stride(0),
        RANK=rank,
        SPLITS=splits,
        BLOCK_S=triton.next_power_of_2(splits),
        STEPS=blocks.steps,
        BLOCK_T=blocks.tokens,
        BLOCK_R=_power_of_2(rank),
        BLOCK_N=blocks.columns,
        **_options(y, blocks.warps, early=early),
    )


def _three(matrices: Sequence[Tensor]) -> list[Tensor]:
    return [*matrices, matrices[0], matrices[0]][:3]  # a kernel has a fixed number of arguments


def _power_of_2(size: int) -> int:
    return max(16, triton.next_power_of_2(size))  # tensor cores take no less


def _power_of_2_below(size: int) -> int:
    return 1 << max(0, size.bit_length() - 1)


def _options(tensor: Tensor, warps: int, *, early: bool) -> Mapping[str, int]:
    early = early and tensor.is_cuda and _can_start_early(tensor.device)
    return {"num_warps": warps, "EARLY": early} | ({"launch_pdl": True} if early else {})


@cache
def _can_start_early(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


@triton.jit
def _pick(index, first, second, third):
    return tl.where(index == 0, first, tl.where(index == 1, second, third))


@triton.jit(do_not_specialize=["num_tokens"])
def _shrink_kernel(
    x,
    a0,
    a1,
    a2,
    partials,
    num_tokens,
    K,
    x_stride,
    RANK: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    split = tl.program_id(0)
    rank_blocks: tl.constexpr = (RANK + BLOCK_R - 1) // BLOCK_R
    slice = tl.program_id(1) // rank_blocks
    a = _pick(slice, a0, a1, a2)
    t = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    r = tl.program_id(1) % rank_blocks * BLOCK_R + tl.arange(0, BLOCK_R)
    if EARLY:
        tl.extra.cuda.gdc_wait()  # before anything that an earlier kernel wrote is read
        tl.extra.cuda.gdc_launch_dependents()
    total = tl.full([BLOCK_T, BLOCK_R], 0.0, tl.float32)
    for start in range(0, CHUNK, BLOCK_K):
        k = split * CHUNK + start + tl.arange(0, BLOCK_K)
        x_tile = tl.load(
            x + t[:, None] * x_stride + k[None, :], mask=(t < num_tokens)[:, None] & (k < K)[None, :], other=0.0
        )
        a_tile = tl.load(a + r[None, :] * K + k[:, None], mask=(r < RANK)[None, :] & (k < K)[:, None], other=0.0)
        total = tl.dot(x_tile, a_tile, total)
    row = (slice * tl.num_programs(0) + split) * num_tokens + t
    tl.store(partials + row[:, None] * RANK + r[None, :], total, mask=(t < num_tokens)[:, None] & (r < RANK)[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _expand_kernel(
    y,
    partials,
    b0,
    b1,
    b2,
    indices,
    num_tokens,
    n0,
    n1,
    n2,
    y_stride,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EARLY: tl.constexpr,
):
    # Programs of the first slice come first, then those of the second and of the third: none of them straddles two.
    block = tl.program_id(0)
    columns: tl.constexpr = STEPS * BLOCK_N
    blocks0, blocks1 = (n0 + columns - 1) // columns, (n1 + columns - 1) // columns
    slice = (block >= blocks0).to(tl.int32) + (block >= blocks0 + blocks1).to(tl.int32)
    b, width = _pick(slice, b0, b1, b2), _pick(slice, n0, n1, n2)
    n = (block - _pick(slice, 0, blocks0, blocks0 + blocks1)) * columns + tl.arange(0, BLOCK_N)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    r = tl.arange(0, BLOCK_R)
    in_b = (r < RANK)[:, None]
    b_tile = tl.load(b + n[None, :] * RANK + r[:, None], mask=in_b & (n < width)[None, :], other=0.0)
    with_adapter = tl.load(indices + t, mask=t < num_tokens, other=-1) >= 0
    if EARLY:
        tl.extra.cuda.gdc_wait()
    out = y + t[:, None] * y_stride + _pick(slice, 0, n0, n0 + n1)
    inside = with_adapter[:, None] & (n < width)[None, :]
    y_tile = tl.load(out + n[None, :], mask=inside, other=0.0)
    split = tl.arange(0, BLOCK_S)
    row = (slice * SPLITS + split)[None, :] * num_tokens + t[:, None]  # [T, splits]
    in_row = (split < SPLITS)[None, :] & with_adapter[:, None]
    # All at once: in a loop, each load would wait for the one before.
    parts = tl.load(
        partials + row[:, :, None] * RANK + r[None, None, :],
        mask=in_row[:, :, None] & (r < RANK)[None, None, :],
        other=0.0,
    )
    hidden = tl.reduce(parts, 1, tl.standard._sum_combine).to(b_tile.dtype)  # tl.sum itself may not be interpreted
    for step in tl.static_range(STEPS):
        total = tl.dot(hidden, b_tile, y_tile.to(tl.float32))
        tl.store(out + n[None, :], total.to(y.dtype.element_ty), mask=inside)
        if step + 1 < STEPS:
            n += BLOCK_N
            inside = with_adapter[:, None] & (n < width)[None, :]
            y_tile = tl.load(out + n[None, :], mask=inside, other=0.0)
            b_tile = tl.load(b + n[None, :] * RANK + r[:, None], mask=in_b & (n < width)[None, :], other=0.0)
