"""Triton kernels that add one LoRA adapter, y += (x A^T) B^T, to the output y of a linear layer with any kind of frozen
weight; used in rollouts.

A linear layer that vLLM fuses (q/k/v, gate/up) has slices of its outputs, each with its own A and B; one launch
computes up to three slices. While decoding, latency dominates: ``shrink`` splits K over the whole GPU and writes one
fp32 partial sum of x A^T per split; ``expand`` adds these in a fixed order (equal inputs give equal bits), and loads B
while ``shrink`` is still running (programmatic dependent launch). With a high rank cuBLAS is faster, and ``add_lora``
calls it.

Tile sizes follow a fixed rule, because no kernel can be timed while a CUDA graph is captured. There are few of them,
because compiling a kernel for another tile size takes longer than a rollout. Letters: T tokens, K inputs, N outputs of
which a slice has n, R rank.
"""

# pyright: reportCallIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false
# Triton's type hints do not have its launch options, scalars and static_range.
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F

from qerl_pl.kernels.launching import dot_size, has_pdl, launch, pdl_options

MATMUL_RANK = 128  # cuBLAS is faster from this rank on, and from MANY_TOKENS tokens on already above HIGH_RANK
MANY_TOKENS, HIGH_RANK = 1024, 64
PROGRAMS = 128  # wanted number of programs of ``shrink``, about one per SM;
MOST_TOKENS = 64 * PROGRAMS  # tile sizes are the same for this number of tokens and all larger ones;
EXPAND_TOKENS = 16  # tokens per program of ``expand``; more tokens need more registers, or fewer splits
MOST_SLICES = 3  # slices per launch, as many as the kernels have pointers for
EXPAND_SUMS = 2**14  # largest number of partial sums in the registers of a program of ``expand``;
WARPS, STAGES = 4, 3
MOST_STEPS = 8  # most output tiles per program of ``expand``, which is compiled for each number


class ShrinkTiles(NamedTuple):
    """Tile sizes of the kernel ``shrink``, which computes x A^T; all but ``chunk`` are powers of 2, at least 16."""

    tokens: int
    rank: int
    k_block: int  # inputs of one step of the loop over K
    chunk: int
    """Number of inputs over which one program sums, a multiple of k_block; K is divided into ceil(K / chunk) splits."""


class ExpandTiles(NamedTuple):
    """Tile sizes of the kernel ``expand``, which multiplies x A^T by B^T; powers of 2, the first two at least 16."""

    tokens: int
    outputs: int
    steps: int
    """Number of output tiles that a program computes one after another, after adding up the partial sums once."""


@lru_cache(1024)
def shrink_tiles(num_tokens: int, K: int, rank: int, num_slices: int) -> ShrinkTiles:
    """Choose tile sizes of the kernel ``shrink`` that split K into enough parts to occupy the GPU, but few for
    ``expand`` to add up."""
    tokens, tile_rank, k_block = min(dot_size(num_tokens), 64), min(dot_size(rank), 64), 128
    tiles = triton.cdiv(num_tokens, tokens) * triton.cdiv(rank, tile_rank) * num_slices
    splits = _power_of_2_below(min(PROGRAMS // tiles, 32, EXPAND_SUMS // (EXPAND_TOKENS * dot_size(rank))))
    return ShrinkTiles(tokens, tile_rank, k_block, k_block * triton.cdiv(K, k_block * splits))


@lru_cache(1024)
def expand_tiles(num_tokens: int, widths: tuple[int, ...]) -> ExpandTiles:
    """Choose tile sizes of the kernel ``expand`` such that each SM has four programs or more, if there are enough
    outputs. ``widths`` are the numbers of outputs of the linear layers that are fused into one."""
    per_program = triton.cdiv(sum(widths) * triton.cdiv(num_tokens, EXPAND_TOKENS), 4 * PROGRAMS)
    outputs = min(dot_size(per_program), 128)
    return ExpandTiles(EXPAND_TOKENS, outputs, min(_power_of_2_below(per_program // outputs), MOST_STEPS))


def token_counts(K: int, widths: tuple[int, ...], rank: int, *, fewest: int = 1) -> list[int]:
    """Return the numbers of tokens with which ``add_lora`` has to be called so that every Triton kernel that it may
    need is compiled: for each combination of tile sizes, the lowest number, at least ``fewest``, that uses it.
    ``widths`` are the numbers of outputs of the linear layers fused into one."""
    first: dict[tuple[ShrinkTiles, ExpandTiles], int] = {}
    end = MANY_TOKENS if rank > HIGH_RANK else MOST_TOKENS + 1
    # From one multiple of EXPAND_TOKENS to the next, tile sizes are the same.
    for count in (fewest, *range(fewest + EXPAND_TOKENS - (fewest - 1) % EXPAND_TOKENS, end, EXPAND_TOKENS)):
        first.setdefault((shrink_tiles(count, K, rank, len(widths)), expand_tiles(count, widths)), count)
    return list(first.values())


def add_lora(y: Tensor, x: Tensor, a: Sequence[Tensor], b: Sequence[Tensor], indices: Tensor) -> None:
    """Add a LoRA adapter's (x A^T) B^T to the rows of y whose entry in ``indices`` is not negative; no bit of the other
    rows changes. Sums are fp32; x A^T and y are rounded once. A slice is one of the linear layers, such as q, that are
    fused into one.

    Args:
        y: [T, N], written in place; any row stride.
        x: [T, K] of the same dtype; any row stride.
        a: the matrices A, one [R, K] for each slice.
        b: the matrices B, one [n, R] for each slice; together they have N rows.
        indices: [T] or longer, int64: 0 for a token with the adapter, -1 for one without.
    """
    if not len(x):
        return
    if is_matmul_faster(x, a) or not have_short_offsets(x, y):
        add_lora_by_matmul(y, x, a, b, indices)
    elif len(a) > MOST_SLICES:
        width = sum(map(len, b[:MOST_SLICES]))
        add_lora(y[:, :width], x, a[:MOST_SLICES], b[:MOST_SLICES], indices)
        add_lora(y[:, width:], x, a[MOST_SLICES:], b[MOST_SLICES:], indices)
    else:
        partials = shrink(x, a, shrink_tiles(len(x), x.shape[1], len(a[0]), len(a)))
        expand(y, partials, b, indices, expand_tiles(len(x), tuple(map(len, b))))


def is_matmul_faster(x: Tensor, a: Sequence[Tensor]) -> bool:
    """Return whether ``add_lora`` uses cuBLAS: for high ranks, and for fp32, which the kernels do not multiply."""
    lowest_rank = HIGH_RANK + 1 if len(x) >= MANY_TOKENS else MATMUL_RANK
    return len(a[0]) >= lowest_rank or x.dtype == torch.float32


def have_short_offsets(*matrices: Tensor) -> bool:
    """Return whether the offset of every element fits the 32-bit integers that the kernels use."""
    return all(len(matrix) * matrix.stride(0) < 2**31 for matrix in matrices)


def add_lora_by_matmul(y: Tensor, x: Tensor, a: Sequence[Tensor], b: Sequence[Tensor], indices: Tensor) -> None:
    """Add a LoRA adapter's (x A^T) B^T to y by two cuBLAS calls for each slice. x must be finite: for tokens without
    the adapter x A^T is multiplied by 0, which would give NaN for infinities."""
    with_adapter = (indices[: len(x)] >= 0).unsqueeze(1)
    for part, first, second in zip(y.split([len(matrix) for matrix in b], dim=1), a, b, strict=True):
        part.addmm_(F.linear(x, first) * with_adapter, second.t())


def shrink(x: Tensor, a: Sequence[Tensor], tiles: ShrinkTiles) -> Tensor:
    """Compute x A^T as partial sums over parts of the K inputs, [slices, splits, T, R] fp32, for x [T, K] and one
    contiguous A [R, K] for each slice. From compute capability 9.0 on, the kernel may start before the previous kernel
    of the stream has ended, and waits for its end before reading x.
    """
    assert x.stride(1) == 1, x.stride()
    assert all(matrix.is_contiguous() for matrix in a), [matrix.stride() for matrix in a]
    (num_tokens, K), rank = x.shape, len(a[0])
    splits = triton.cdiv(K, tiles.chunk)
    partials = torch.empty(len(a), splits, num_tokens, rank, dtype=torch.float32, device=x.device)
    grid = splits, len(a) * triton.cdiv(rank, tiles.rank), triton.cdiv(num_tokens, tiles.tokens)
    constants = {"RANK": rank, "CHUNK": tiles.chunk, "BLOCK_T": tiles.tokens, "BLOCK_R": tiles.rank}
    constants |= {"BLOCK_K": tiles.k_block, "PDL": has_pdl(x)}
    arguments = x, *_three(a), partials, num_tokens, K, x.stride(0)
    launch(_shrink_kernel, grid, arguments, constants, num_stages=STAGES, num_warps=WARPS, **pdl_options(x))
    return partials


def expand(y: Tensor, partials: Tensor, b: Sequence[Tensor], indices: Tensor, tiles: ExpandTiles) -> None:
    """Add (x A^T) B^T, in place, to those rows of y [T, N] whose entry in ``indices`` is not negative, from the
    ``partials`` that ``shrink`` returns and one contiguous B [n, R] for each slice. ``shrink`` must be the previous
    kernel of the stream: from compute capability 9.0 on, this kernel starts before ``shrink`` has ended, loads B, and
    then waits for the partial sums.
    """
    assert y.stride(1) == 1, y.stride()
    assert all(matrix.is_contiguous() for matrix in b), [matrix.stride() for matrix in b]
    _, splits, num_tokens, rank = partials.shape
    widths = [len(matrix) for matrix in b]
    outputs = tiles.outputs * tiles.steps
    grid = sum(triton.cdiv(width, outputs) for width in widths), triton.cdiv(num_tokens, tiles.tokens)
    constants = {"RANK": rank, "SPLITS": splits, "BLOCK_S": triton.next_power_of_2(splits), "STEPS": tiles.steps}
    constants |= {"BLOCK_T": tiles.tokens, "BLOCK_R": dot_size(rank), "BLOCK_N": tiles.outputs, "PDL": has_pdl(y)}
    arguments = y, partials, *_three(b), indices, num_tokens, *(widths + [0, 0])[:3], y.stride(0)
    launch(_expand_kernel, grid, arguments, constants, num_warps=WARPS, **pdl_options(y))


def _three(matrices: Sequence[Tensor]) -> list[Tensor]:
    return [*matrices, matrices[0], matrices[0]][:3]  # the kernels take three pointers, whatever the number of slices


def _power_of_2_below(size: int) -> int:
    return 1 << max(0, size.bit_length() - 1)


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
    PDL: tl.constexpr,
):
    split = tl.program_id(0)
    rank_blocks: tl.constexpr = (RANK + BLOCK_R - 1) // BLOCK_R
    slice = tl.program_id(1) // rank_blocks
    a = _pick(slice, a0, a1, a2)
    t = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    r = tl.program_id(1) % rank_blocks * BLOCK_R + tl.arange(0, BLOCK_R)
    if PDL:
        tl.extra.cuda.gdc_wait()  # the previous kernel of the stream may have written x
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
    PDL: tl.constexpr,
):
    # Programs are numbered slice after slice, and each program computes outputs of one slice only.
    block = tl.program_id(0)
    outputs: tl.constexpr = STEPS * BLOCK_N
    blocks0, blocks1 = (n0 + outputs - 1) // outputs, (n1 + outputs - 1) // outputs
    slice = (block >= blocks0).to(tl.int32) + (block >= blocks0 + blocks1).to(tl.int32)
    b, width = _pick(slice, b0, b1, b2), _pick(slice, n0, n1, n2)
    n = (block - _pick(slice, 0, blocks0, blocks0 + blocks1)) * outputs + tl.arange(0, BLOCK_N)
    t = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    r = tl.arange(0, BLOCK_R)
    in_b = (r < RANK)[:, None]
    b_tile = tl.load(b + n[None, :] * RANK + r[:, None], mask=in_b & (n < width)[None, :], other=0.0)
    with_adapter = tl.load(indices + t, mask=t < num_tokens, other=-1) >= 0
    if PDL:
        tl.extra.cuda.gdc_wait()
    out = y + t[:, None] * y_stride + _pick(slice, 0, n0, n0 + n1)
    inside = with_adapter[:, None] & (n < width)[None, :]
    y_tile = tl.load(out + n[None, :], mask=inside, other=0.0)
    split = tl.arange(0, BLOCK_S)
    row = (slice * SPLITS + split)[None, :] * num_tokens + t[:, None]  # [T, splits]
    in_row = (split < SPLITS)[None, :] & with_adapter[:, None]
    # The partial sums of all splits are loaded at once, because in a loop each load would wait for the previous one.
    parts = tl.load(
        partials + row[:, :, None] * RANK + r[None, None, :],
        mask=in_row[:, :, None] & (r < RANK)[None, None, :],
        other=0.0,
    )
    hidden = tl.reduce(parts, 1, tl.standard._sum_combine).to(b_tile.dtype)  # Triton's interpreter has no tl.sum
    for step in tl.static_range(STEPS):
        total = tl.dot(hidden, b_tile, y_tile.to(tl.float32))
        tl.store(out + n[None, :], total.to(y.dtype.element_ty), mask=inside)
        if step + 1 < STEPS:
            n += BLOCK_N
            inside = with_adapter[:, None] & (n < width)[None, :]
            y_tile = tl.load(out + n[None, :], mask=inside, other=0.0)
            b_tile = tl.load(b + n[None, :] * RANK + r[:, None], mask=in_b & (n < width)[None, :], other=0.0)
