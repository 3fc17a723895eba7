"""LoRA adapters fused into the NVFP4 GEMMs on Hopper, so that the output y = x W^T + h B^T, with h = x A^T, is written
only once.

There are two GEMM kernels. The decode GEMM (``nvfp4_decode``) also computes h, in additional thread blocks of the same
launch (``Adapter``). For the batch GEMM (``nvfp4_batch``), a separate kernel ``shrink`` computes h and lets the GEMM
start before it ends (``Update``). While h is computed, either GEMM multiplies x by the base model's weights. Then it
waits for h, and adds h B^T to its fp32 sums in a fixed order before it rounds them. A slice is one of the linear
layers, such as q, k and v, that are fused into one. Letters: T tokens, K inputs, R rank.
"""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qerl_pl.hopper import costs, driver

FEW_TOKENS, MOST_TOKENS, MOST_RANK, MOST_SLICES = 64, 256, 64, 3
BLOCK_RANKS, SLICE_THREADS = 32, 256
CHUNKS_IN_FLIGHT = {1: {8: 4, 16: 4, 32: 2, 64: 2}, 2: {8: 4, 16: 3, 32: 2}, 3: {8: 2, 16: 2, 32: 1}}
"""Number of chunks of 32 inputs that a warp of the kernel ``shrink`` loads at a time, by the number of slices and the
number of tokens per tile; larger numbers would need more registers than there are."""
CHUNK, RANKS, OUTPUTS = 32, 8, 64  # supported K, R and outputs per slice are multiples of these;
SPLITS = 8  # thread blocks per cluster of ``shrink``, each of which has a part of the inputs
NO_SLICE = 2**31 - 1
PARAMETERS = "u16 *hidden, const u16 *b0, const u16 *b1, const u16 *b2, int first1, int first2, int rank"
ADAPTER = "Adapter{hidden, b0, b1, b2, first1, first2, rank}"
SHRINK_PARAMETERS = "const u16 *a0, const u16 *a1, const u16 *a2, const long long *indices, int clusters"
SHRINK = "Shrink{a0, a1, a2, indices, clusters}"


class Update(NamedTuple):
    """Arguments with which the batch GEMM (``nvfp4_batch``) adds a LoRA adapter to its output: for each of the linear
    layers that are fused into one (such as q, k and v), h = x A^T, which the kernel ``shrink`` has computed, and the
    matrix B."""

    hidden: Tensor  # [slices, T, R] bf16 from ``shrink``, which must be the previous kernel of the stream
    b: Sequence[Tensor]  # one [n, R] bf16 for each slice, contiguous


class Adapter(NamedTuple):
    """Arguments with which the decode GEMM computes and adds a LoRA adapter that ``fits_adapter`` accepts."""

    a: Sequence[Tensor]  # one [R, K] bf16 for each slice, contiguous
    b: Sequence[Tensor]  # one [n, R] bf16 for each slice, contiguous
    indices: Tensor  # [T] or longer, int64; negative for a token without the adapter


class Schedule(NamedTuple):
    """Division of the computation of h = x A^T by the kernel ``shrink`` among thread blocks."""

    tokens: int  # tokens per tile of h = x A^T; a thread block computes one tile at a time
    clusters: int
    """Clusters of thread blocks per 32 ranks; each computes its share of the tiles of tokens one after another."""


class SpareSMs(NamedTuple):
    """Number of SMs that the first wave of thread blocks of a base layer's GEMM leaves idle, and the time that
    ``shrink`` has on them."""

    sms: int
    seconds: float  # predicted seconds from the start of the base GEMM until h is needed


def fits_adapter(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """Return whether the GEMM kernels can add a LoRA adapter with an A [R, K] and a B [n, R] per slice."""
    rank, inputs = a[0].shape
    return (
        len(a) <= MOST_SLICES
        and rank <= MOST_RANK
        and not (rank % RANKS or inputs % CHUNK)
        and not any(len(matrix) % OUTPUTS for matrix in b)
        and all(tensor.dtype == torch.bfloat16 for tensor in (*a, *b))
    )


def choose_schedule(num_tokens: int, a: Sequence[Tensor], b: Sequence[Tensor], spare: SpareSMs) -> Schedule | None:
    """Choose how ``shrink`` is divided among thread blocks, given the SMs that the base layer's GEMM (``nvfp4_batch``)
    leaves idle, for an A [R, K] and a B [n, R] per slice. Returns None if the adapter cannot be fused into the GEMM, or
    if adding it after the GEMM is faster."""
    if not 0 < num_tokens <= MOST_TOKENS or not fits_adapter(a, b):
        return None
    rank, inputs = a[0].shape
    sizes = CHUNKS_IN_FLIGHT[len(a)]
    tokens = next((most for most in sizes if num_tokens <= most), max(sizes))
    tiles = -(-num_tokens // tokens)
    most = min(tiles, spare.sms // (-(-rank // BLOCK_RANKS) * SPLITS))
    if num_tokens <= FEW_TOKENS:  # h is computed before the base GEMM needs it
        return Schedule(tokens, max(1, most))
    constant, per_input = costs.SHRINK_TILE_S[len(a)]
    tile_s = constant + per_input * inputs
    shares = {count: -(-tiles // count) * tile_s / spare.seconds for count in range(1, most + 1)}
    clusters = next((count for count, share in shares.items() if share <= costs.IN_TIME), most)
    if clusters and shares[clusters] <= costs.TOO_LATE:
        return Schedule(tokens, clusters)
    if sum(map(len, b)) in costs.WIDE_OUTPUTS:
        return Schedule(costs.WIDE_TOKENS, -(-num_tokens // costs.WIDE_TOKENS))
    return None


@cache
def kernel(tokens: int, slices: int) -> driver.Kernel:
    """Return the instance of ``shrink`` for a number of tokens per tile and of slices."""
    name, threads = f"lora_shrink_{tokens}_{slices}", slices * SLICE_THREADS
    chunks = CHUNKS_IN_FLIGHT[slices][tokens]
    code = f"""
extern "C" __global__ void __launch_bounds__({threads}, 1)
    {name}(const u16 *x, const u16 *a0, const u16 *a1, const u16 *a2, const long long *indices, u16 *hidden,
    int tokens, int K, int rank, int splits) {{
  lora_shrink<{tokens}, {slices}, {chunks}>(x, a0, a1, a2, indices, hidden, tokens, K, rank, splits);
}}
"""
    return driver.Kernel("lora_hopper.cu", name, code, threads // 32 * tokens * (BLOCK_RANKS + 4) * 4)


def all_kernels() -> list[driver.Kernel]:
    """List every instance of the kernel ``shrink`` that an adapter may need."""
    return [kernel(tokens, slices) for slices, by_tokens in CHUNKS_IN_FLIGHT.items() for tokens in by_tokens]


def shrink(x: Tensor, a: Sequence[Tensor], indices: Tensor, schedule: Schedule) -> Tensor:
    """Compute h = x A^T, [slices, T, R] bf16, rounded once, from x [T, K] and a contiguous A [R, K] bf16 for each
    slice. h is zero for tokens whose entry in ``indices``, [T] or longer, is negative.

    The next kernel of the stream may start before this one ends, so it must execute ``griddepcontrol.wait`` before it
    reads h. All its other inputs must be complete before this kernel starts.
    """
    assert x.is_contiguous(), x.stride()
    assert all(matrix.is_contiguous() for matrix in a), [matrix.stride() for matrix in a]
    (num_tokens, inputs), rank = x.shape, len(a[0])
    hidden = x.new_empty(len(a), num_tokens, rank)
    driver.launch(
        kernel(schedule.tokens, len(a)),
        grid=(-(-rank // BLOCK_RANKS), SPLITS, schedule.clusters),
        threads=len(a) * SLICE_THREADS,
        cluster=SPLITS,
        device=x.device,
        arguments=[x, *_pointers(a), indices, hidden, num_tokens, inputs, rank, SPLITS],
        pdl=True,
    )
    return hidden


def arguments(update: Update | None) -> list[Any]:
    """Build the launch arguments of ``PARAMETERS``; null pointers and zeros if there is no adapter."""
    if update is None:
        return [None] * 4 + [0] * 3
    first = [*accumulate(map(len, update.b[:-1])), NO_SLICE, NO_SLICE][:2]
    return [update.hidden, *_pointers(update.b), *first, update.hidden.shape[2]]


def shrink_arguments(adapter: Adapter | None) -> list[Any]:
    """Build the launch arguments of ``SHRINK_PARAMETERS``; null pointers and zero if there is no adapter."""
    return [*_pointers(adapter.a), adapter.indices, hidden_clusters(adapter)] if adapter else [None] * 4 + [0]


def hidden_clusters(adapter: Adapter) -> int:
    """Return the number of clusters of thread blocks with which the decode GEMM computes h = x A^T of an adapter: one
    for each ``BLOCK_RANKS`` of the R rows of each of its matrices A [R, K]."""
    return len(adapter.a) * -(-len(adapter.a[0]) // BLOCK_RANKS)


def _pointers(matrices: Sequence[Tensor]) -> list[Tensor | None]:
    return [*matrices, None, None][:MOST_SLICES]  # None (a null pointer) for slices that do not exist
