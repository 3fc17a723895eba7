"""An adapter that the NVFP4 kernels add while they decode, on Hopper: one launch more for a linear, and no pass over y.

``shrink`` computes h = x A^T and lets the base's kernel start at once, which multiplies x by the weights meanwhile,
waits for h at its end and adds h B^T to its fp32 sums (programmatic dependent launch). So an adapter costs about what
one launch does. Sums are added up in a fixed order: equal inputs give equal bits. T tokens, K inputs, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qerl_pl.kernels import hopper

FEW_TOKENS, MOST_TOKENS, MOST_RANK, MOST_SLICES = 64, 256, 64, 3
BLOCK_RANKS, SLICE_THREADS = 32, 256
AHEAD = {1: {8: 4, 16: 4, 32: 2, 64: 2}, 2: {8: 4, 16: 3, 32: 2}, 3: {8: 2, 16: 2, 32: 1}}
"""By slices and a block's tokens: chunks of inputs that a warp asks for at a time. Registers allow no more."""
CHUNK, RANKS, OUTPUTS = 32, 8, 64  # K, R and a slice's outputs are multiples of these
SPLITS = 8  # blocks that share the inputs
# With more than few tokens the base waits for h if that is not there in time. Seconds for a tile of tokens, of an H200
# that multiplies by weights meanwhile: by slices a constant and an input's (sweeps over Qwen2.5-3B to 32B).
TILE_S = {1: (4e-6, 0.55e-9), 2: (4e-6, 0.6e-9), 3: (4.2e-6, 0.9e-9)}
# Times the room's seconds: no more clusters than it takes to have h by the first. Where there is room for too few to
# have it by the second, a pass over y takes less time.
EARLY, LATE = 0.8, 1.1
# Where the base needs the whole GPU, all tiles at the same time are still faster for these outputs: with fewer of them
# a pass over y takes less time, with more of them the base's blocks add their parts one after another.
WIDE, WIDE_TOKENS = range(16384, 40961), 16
NO_SLICE = 2**31 - 1
PARAMETERS = "const u16 *hidden, const u16 *b0, const u16 *b1, const u16 *b2, int first1, int first2, int rank"
ADAPTER = "Adapter{hidden, b0, b1, b2, first1, first2, rank}"


class Update(NamedTuple):
    """What is added to a linear's output: h B^T, a slice beside the other."""

    hidden: Tensor
    """[slices, T, R] bf16, of ``shrink``, which must be the kernel that was launched last."""
    b: Sequence[Tensor]
    """One [n, R] bf16 for each slice, contiguous."""


class Blocks(NamedTuple):
    """How ``shrink`` shares its work."""

    tokens: int
    """Of a block: a tile."""
    clusters: int
    """Of blocks with the same ranks. Each has tiles of its own, one after another."""


class Room(NamedTuple):
    """Beside a base's kernel, at its start, as that does not get slower."""

    multiprocessors: int
    seconds: float
    """When they are over, the base's first blocks end and wait for h."""


def blocks(num_tokens: int, a: Sequence[Tensor], b: Sequence[Tensor], room: Room) -> Blocks | None:
    """For an adapter of these shapes and dtypes; None where it is better added apart, or the kernels cannot take it.

    Args:
        num_tokens: in the batch.
        a: one [R, K] for each slice.
        b: one [n, R] for each slice.
        room: beside the base's kernel.
    """
    rank, inputs = a[0].shape
    if (
        not 0 < num_tokens <= MOST_TOKENS
        or len(a) > MOST_SLICES
        or rank > MOST_RANK
        or (rank % RANKS or inputs % CHUNK)
        or any(len(matrix) % OUTPUTS for matrix in b)
        or any(tensor.dtype != torch.bfloat16 for tensor in (*a, *b))
    ):
        return None
    sizes = AHEAD[len(a)]
    tokens = next((most for most in sizes if num_tokens <= most), max(sizes))
    tiles = -(-num_tokens // tokens)
    most = min(tiles, room.multiprocessors // (-(-rank // BLOCK_RANKS) * SPLITS))
    if num_tokens <= FEW_TOKENS:
        return Blocks(tokens, max(1, most))
    constant, of_input = TILE_S[len(a)]
    tile_s = constant + of_input * inputs
    shares = {count: -(-tiles // count) * tile_s / room.seconds for count in range(1, most + 1)}
    clusters = next((count for count, share in shares.items() if share <= EARLY), most)
    if clusters and shares[clusters] <= LATE:
        return Blocks(tokens, clusters)
    if sum(map(len, b)) in WIDE:
        return Blocks(WIDE_TOKENS, -(-num_tokens // WIDE_TOKENS))
    return None


@cache
def kernel(tokens: int, slices: int) -> hopper.Kernel:
    """An instance of the template in `lora_hopper.cu`, for a block of so many tokens."""
    name, threads = f"lora_shrink_{tokens}_{slices}", slices * SLICE_THREADS
    code = f"""
extern "C" __global__ void __launch_bounds__({threads}, 1)
    {name}(const u16 *x, const u16 *a0, const u16 *a1, const u16 *a2, const long long *indices, u16 *hidden,
    int tokens, int K, int rank, int splits) {{
  lora_shrink<{tokens}, {slices}, {AHEAD[slices][tokens]}>(x, a0, a1, a2, indices, hidden, tokens, K, rank, splits);
}}
"""
    return hopper.Kernel("lora_hopper.cu", name, code, threads // 32 * tokens * (BLOCK_RANKS + 4) * 4)


def all_kernels() -> list[hopper.Kernel]:
    """What an adapter may need."""
    return [kernel(tokens, slices) for slices, by_tokens in AHEAD.items() for tokens in by_tokens]


def shrink(x: Tensor, a: Sequence[Tensor], indices: Tensor, how: Blocks) -> Tensor:
    """h = x A^T, rounded to bf16 once, and zero for tokens without the adapter.

    The kernel that is launched next may start before this one ends, and so must wait for it before it reads h. The
    kernel launched before must have written all that the next one reads besides.

    Args:
        x: [T, K] bf16, contiguous.
        a: one [R, K] bf16 for each slice, contiguous.
        indices: [T] or longer, int64: negative for a token without the adapter.
        how: of ``blocks``.

    Returns:
        [slices, T, R] bf16.
    """
    assert x.is_contiguous(), x.stride()
    assert all(matrix.is_contiguous() for matrix in a), [matrix.stride() for matrix in a]
    (num_tokens, inputs), rank = x.shape, len(a[0])
    hidden = x.new_empty(len(a), num_tokens, rank)
    hopper.launch(
        kernel(how.tokens, len(a)),
        grid=(-(-rank // BLOCK_RANKS), SPLITS, how.clusters),
        threads=len(a) * SLICE_THREADS,
        cluster=SPLITS,
        device=x.device,
        arguments=[x, *_pointers(a), indices, hidden, num_tokens, inputs, rank, SPLITS],
        early=True,
    )
    return hidden


def arguments(update: Update | None) -> list[Any]:
    """Of a kernel that has ``PARAMETERS``."""
    if update is None:
        return [None] * 4 + [0] * 3
    first = [*accumulate(map(len, update.b[:-1])), NO_SLICE, NO_SLICE][:2]
    return [update.hidden, *_pointers(update.b), *first, update.hidden.shape[2]]


def _pointers(matrices: Sequence[Tensor]) -> list[Tensor | None]:
    return [*matrices, None, None][:MOST_SLICES]  # null for a slice that there is not
