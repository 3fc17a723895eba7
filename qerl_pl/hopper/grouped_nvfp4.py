"""Triton kernels with which vLLM computes the experts of a mixture-of-experts (MoE) layer from NVFP4 weights in the
trainer's layout, so that trainer and vLLM can share one copy.

A row is a token together with one of the k experts chosen for it. The weights of all experts are one stacked tensor
(``quant.experts.StackedLinear``). Letters: T tokens, k experts per token, S = T k rows, E experts, K inputs, N outputs
of which a slice (gate, up) has n.

A 32-bit word of a weight has the 4-bit codes of eight neighbouring columns. The codes of columns i and i + 4 are 16
bits apart, so a few operations on the whole word make a pair of bf16 numbers of them; to pair neighbours, their bits
would have to be moved apart first. The dequantised columns are therefore in another order. A sum over K may have any
order, so the kernel puts the columns of each tile of x in the same order (``_columns_of_x``). In this order, the codes
that a thread needs for the tensor cores are also 16 consecutive bytes.

The product of a code and its block scale has at most six significant bits, so it is exact in bf16. The tensor scale is
multiplied with the fp32 sums.
"""

# pyright: reportCallIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false
# Triton's type hints do not have its launch options, scalars and tensors.
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl_pl.kernels.launching import has_pdl, launch, pdl_options
from qerl_pl.quant.formats import PackedWeight

SCANNED = 4096
"""Most ids of experts that a thread block of ``find_rows`` reads at a time."""

_SIGNS = tl.constexpr(0x80008000 - 2**32)
_KEPT = tl.constexpr(0x81C081C0 - 2**32)


class Rows(NamedTuple):
    """Rows (pairs of a token and an expert chosen for it) by expert, in lists called slots: one per expert or, if there
    are fewer rows than experts, one per row. The slot of an expert's first row then lists all of its rows, and the
    slots of its other rows are empty."""

    expert: Tensor
    """[slots] int32, the expert of each slot."""
    count: Tensor
    """[slots] int32, the number of its rows."""
    row: Tensor
    """[slots, S] int32, in ascending order its rows; what follows them is undefined."""
    chosen: int
    """Experts per token, k."""


class Tile(NamedTuple):
    """Sizes of what a thread block multiplies at a time, and its resources."""

    rows: int
    outputs: int = 128
    inputs: int = 128
    """A multiple of 128, because of ``_columns_of_x``."""
    warps: int = 4
    stages: int = 4
    registers: int = 128
    """Largest number of registers of a thread: 128 let 16 warps run on an SM at the same time, and 168 let 12."""


def choose_tile(num_rows: int, num_experts: int) -> Tile:
    """Choose the part of the product that a thread block computes at a time, such that the rows of most experts fit
    into one tile, because the weights of an expert are read once for each of its tiles."""
    average = num_rows / num_experts
    if num_rows <= num_experts // 4:  # so few thread blocks have rows that smaller ones are needed to use every SM
        return Tile(16, 64)
    if average <= 10:
        return Tile(16)
    return Tile(32, registers=168) if average <= 22 else Tile(64, 256, warps=8, stages=3)


def find_rows(ids: Tensor, num_experts: int) -> Rows:
    """Find the rows that each expert computes. ``ids`` [T, k], contiguous integers, are the experts chosen for each
    token; row t k + j is token t with its j-th expert. Rows whose expert is negative or at least ``num_experts`` are
    left out."""
    if ids.ndim != 2 or not ids.is_contiguous() or ids.is_floating_point():
        raise ValueError(f"ids: {ids.dtype} {tuple(ids.shape)}; expected contiguous integers [T, k]")
    num_rows = ids.numel()
    slots = min(num_rows, num_experts)
    expert, count = torch.empty(2, slots, dtype=torch.int32, device=ids.device)
    row = torch.empty(slots, num_rows, dtype=torch.int32, device=ids.device)
    if num_rows:
        block = min(SCANNED, max(32, triton.next_power_of_2(num_rows)))
        constants = {"PER_ROW": slots < num_experts, "BLOCK": block, "PDL": has_pdl(ids)}
        arguments, warps = (expert, count, row, ids, num_rows, num_experts), min(8, max(1, block // 128))
        launch(_find_kernel, (slots,), arguments, constants, num_warps=warps, **pdl_options(ids))
    return Rows(expert, count, row, ids.shape[1])


def multiply(
    x: Tensor,
    weights: Sequence[PackedWeight],
    rows: Rows,
    shares: Tensor | None = None,
    tile: Tile | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Multiply each of S rows by the weight of the row's expert: y = x W^T, [S, N] in the dtype of x. Sums are fp32,
    and rounded once. Rows that ``find_rows`` left out are undefined in y.

    Args:
        x: [T, K] or [S, K], inputs of each token or of each row; bf16, or fp32 in Triton's interpreter.
        weights: NVFP4 weights of all experts, for each of one or two slices. All slices have the same number n of
            outputs, together N per expert. A slice has codes [E, n, K / 2] uint8, the lower four bits for the even
            column; block scales [E, n, K / 16] uint8, bits of E4M3 numbers that are not negative; and tensor scales [E]
            fp32.
        rows: the rows of each expert, from ``find_rows``.
        shares: [T, k] fp32, by which the row's outputs are multiplied before they are rounded; None means 1.
        tile: None means ``choose_tile``.
        out: [S, N] contiguous, the memory for the result; None means that it is allocated.

    Raises:
        ValueError: shapes, dtypes or strides are others than these.
    """
    num_rows, (num_experts, width, half) = rows.row.shape[1], weights[0].codes.shape
    K = 2 * half
    _check(x, weights, num_rows, rows.chosen, shares)
    y = x.new_empty(num_rows, len(weights) * width) if out is None else out
    if y.shape != (num_rows, len(weights) * width) or y.dtype != x.dtype or not y.is_contiguous():
        raise ValueError(f"out: {y.dtype} {tuple(y.shape)}; expected {x.dtype} {(num_rows, len(weights) * width)}")
    if not num_rows:
        return y
    tile = tile or choose_tile(num_rows, num_experts)
    words = [stack.codes.view(torch.int32) for stack in weights]
    first, last = weights[0], weights[-1]
    slots, parts = len(rows.expert), triton.cdiv(width, tile.outputs)
    constants = {"SLICES": len(weights), "CHOSEN": num_rows // len(x), "WEIGHTED": shares is not None}
    constants |= {"WHOLE": K % tile.inputs == 0, "BLOCK_T": tile.rows, "BLOCK_N": tile.outputs}
    constants |= {"BLOCK_K": tile.inputs, "ASM": x.is_cuda, "PDL": has_pdl(x)}
    arguments = y, x, words[0], words[-1], first.block_scale, last.block_scale, first.global_scale, last.global_scale
    arguments = *arguments, rows.expert, rows.count, rows.row, y if shares is None else shares
    sizes = num_rows, width, K, K // 8, K // 16, x.stride(0)
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "maxnreg": tile.registers, **pdl_options(x)}
    launch(_multiply_kernel, (slots * len(weights) * parts,), (*arguments, *sizes), constants, **options)
    return y


def _check(x: Tensor, weights: Sequence[PackedWeight], num_rows: int, chosen: int, shares: Tensor | None) -> None:
    (num_experts, width, half), dtype = weights[0].codes.shape, torch.bfloat16 if x.is_cuda else torch.float32
    if not 1 <= len(weights) <= 2:
        raise ValueError(f"weights has {len(weights)} slices; expected one or two")
    if half % 8:
        raise ValueError(f"weights have {2 * half} columns; expected a multiple of 16, the block of NVFP4")
    if x.dtype != dtype or x.ndim != 2 or x.shape[1] != 2 * half or x.stride(1) != 1:
        raise ValueError(f"x: {x.dtype} {tuple(x.shape)}, strides {x.stride()}; expected {dtype} rows of {2 * half}")
    if len(x) not in {num_rows // chosen, num_rows}:
        raise ValueError(f"x has {len(x)} rows; expected one per token, {num_rows // chosen}, or per row, {num_rows}")
    for stack in weights:
        shapes = (num_experts, width, half), (num_experts, width, half // 8), (num_experts,)
        tensors, kinds = vars(stack).values(), (torch.uint8, torch.uint8, torch.float32)
        for tensor, shape, kind in zip(tensors, shapes, kinds, strict=True):
            if tensor.shape != shape or tensor.dtype != kind or not tensor.is_contiguous():
                raise ValueError(f"weights: {tensor.dtype} {tuple(tensor.shape)}; expected contiguous {kind} {shape}")
    if shares is not None and (
        shares.dtype != torch.float32 or shares.numel() != num_rows or not shares.is_contiguous()
    ):
        raise ValueError(f"shares: {shares.dtype} {tuple(shares.shape)}; expected contiguous fp32 for {num_rows} rows")


@triton.jit(do_not_specialize=["num_rows"])
def _find_kernel(
    experts, counts, rows, ids, num_rows, num_experts, PER_ROW: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    slot = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_wait()  # the previous kernel of the stream may have written the ids
    expert = slot
    if PER_ROW:
        expert = tl.load(ids + slot).to(tl.int32)
    count, earlier = 0, 0
    for start in range(0, num_rows, BLOCK):
        row = start + tl.arange(0, BLOCK)
        found = ((tl.load(ids + row, mask=row < num_rows, other=-1) == expert) & (row < num_rows)).to(tl.int32)
        number = tl.associative_scan(found, 0, tl.standard._sum_combine)  # 1 for the first row of this expert
        tl.store(rows + slot.to(tl.int64) * num_rows + count + number - 1, row, mask=found != 0)
        count += tl.reduce(found, 0, tl.standard._sum_combine)
        earlier += tl.reduce(tl.where(row < slot, found, 0), 0, tl.standard._sum_combine)
    if PER_ROW:
        count = tl.where((earlier == 0) & (expert >= 0) & (expert < num_experts), count, 0)
    tl.store(experts + slot, expert)
    tl.store(counts + slot, count)


@triton.jit(do_not_specialize=["num_rows"])
def _multiply_kernel(
    y,
    x,
    words0,
    words1,
    scales0,
    scales1,
    factors0,
    factors1,
    experts,
    counts,
    rows,
    shares,
    num_rows,
    width,
    K,
    words_a_row,
    scales_a_row,
    x_stride,
    SLICES: tl.constexpr,
    CHOSEN: tl.constexpr,
    WEIGHTED: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
):
    parts = (width + BLOCK_N - 1) // BLOCK_N
    slot, slice = tl.program_id(0) // (parts * SLICES), tl.program_id(0) // parts % SLICES
    if PDL:
        tl.extra.cuda.gdc_wait()  # the previous kernel of the stream may have written anything that is read here
    # The number of rows is not needed to load the first ones, so these loads do not wait for each other.
    t = tl.arange(0, BLOCK_T)
    rows += slot.to(tl.int64) * num_rows
    expert, count = tl.load(experts + slot).to(tl.int64), tl.load(counts + slot)
    found = tl.load(rows + t, mask=t < num_rows, other=0)
    outputs = tl.program_id(0) % parts * BLOCK_N + tl.arange(0, BLOCK_N)
    place = expert * width + tl.minimum(outputs, width - 1)  # past the end, the last output is computed again
    word, block = tl.arange(0, BLOCK_K // 8), tl.arange(0, BLOCK_K // 16)
    words = tl.where(slice == 0, words0, words1) + place[:, None] * words_a_row + word[None, :]
    scales = tl.where(slice == 0, scales0, scales1) + place[:, None] * scales_a_row + block[None, :]
    column = tl.arange(0, BLOCK_K)
    if count > 0:
        factor = tl.load(tl.where(slice == 0, factors0, factors1) + expert) * 2.0**14
        for first in range(0, count, BLOCK_T):
            t = first + tl.arange(0, BLOCK_T)
            row = tl.where(t < count, found, 0)
            found = tl.load(rows + t + BLOCK_T, mask=t + BLOCK_T < count, other=0)
            x_rows = x + (row // CHOSEN).to(tl.int64)[:, None] * x_stride + column[None, :]
            if WEIGHTED:
                share = tl.load(shares + row) * factor
            total = tl.full([BLOCK_N, BLOCK_T], 0.0, tl.float32)
            for start in range(0, K, BLOCK_K):
                in_x = (t < count)[:, None]
                if WHOLE:
                    packed, scale = tl.load(words + start // 8), tl.load(scales + start // 16)
                else:
                    packed = tl.load(words + start // 8, mask=(start // 8 + word < words_a_row)[None, :], other=0)
                    scale = tl.load(scales + start // 16, mask=(start // 16 + block < scales_a_row)[None, :], other=0)
                    in_x &= (start + column < K)[None, :]
                x_tile = tl.load(x_rows + start, mask=in_x, other=0.0)
                w_tile = _unpack(packed, scale, ASM).to(x.dtype.element_ty)
                total = tl.dot(w_tile, tl.trans(_columns_of_x(x_tile)), total, input_precision="ieee")
            if WEIGHTED:
                total *= share[None, :]
            else:
                total *= factor
            y_rows = y + row.to(tl.int64)[None, :] * (SLICES * width) + slice * width
            inside = (t < count)[None, :] & (outputs < width)[:, None]
            tl.store(y_rows + outputs[:, None], total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _columns_of_x(tile):
    """Put the columns of a tile of x in the order in which ``_unpack`` returns those of the weight."""
    # Column 32 t + 8 w + 4 j + i of each 128 columns becomes column 32 w + 8 i + 2 t + j. Of each group of eight
    # columns, the tensor cores take columns 2 t and 2 t + 1 from thread t of four. In the new order these are the codes
    # i and i + 4 (j = 0 and 1) of the thread's word w, so the four words that a thread needs for 128 columns are
    # consecutive.
    ROWS: tl.constexpr = tile.shape[0]
    GROUPS: tl.constexpr = tile.shape[1] // 128
    split = tl.reshape(tile, [ROWS, GROUPS, 4, 4, 2, 4])  # rows, groups, t, w, j, i
    return tl.reshape(tl.permute(split, 0, 1, 3, 5, 2, 4), [ROWS, GROUPS * 128])


@triton.jit
def _unpack(words, scales, ASM: tl.constexpr):
    """Dequantise a tile of NVFP4 weights, words [N, K / 8] int32 and the bits of E4M3 block scales [N, K / 16] uint8.
    Returns 2^-14 times the weights, without the tensor scale, [N, K] bf16 if ``ASM`` (inline PTX, on a GPU), else fp32,
    with the columns in the order of ``_columns_of_x``."""
    ROWS: tl.constexpr = words.shape[0]
    WORDS: tl.constexpr = words.shape[1]
    GROUPS: tl.constexpr = WORDS // 16
    # The bits of an E4M3 number, moved to the exponent and the top mantissa bits of bf16, are its value times 2^-120.
    # The scales are kept times 2^112, which takes two products, because a factor of 2^232 exceeds bf16's range.
    scales = _products(scales.to(tl.int32) * 0x00100010, tl.full([ROWS, WORDS // 2], 0x7F007F00, tl.int32), ASM)
    scales = _products(scales, tl.full([ROWS, WORDS // 2], 0x74007400, tl.int32), ASM)
    scales = tl.reshape(tl.broadcast_to(scales[:, :, None], [ROWS, WORDS // 2, 2]), [ROWS, WORDS])
    # A code's sign at bit 15 and its exponent and mantissa at bits 8 to 6 are a bf16 number, the code's value times
    # 2^-126, subnormals included. The factors move a copy of the code to each of the two places; the copies do not
    # overlap, so nothing is carried.
    pair0 = _products(((words & 0x000F000F) * 0x1040) & _KEPT, scales, ASM)
    pair1 = _products(((words & 0x00F000F0) * 0x0104) & _KEPT, scales, ASM)
    pair2 = _products((((words >> 4) & 0x00F000F0) * 0x0104) & _KEPT, scales, ASM)
    pair3 = _products((words & _SIGNS) | ((words >> 6) & 0x01C001C0), scales, ASM)
    pairs = tl.join(tl.join(pair0, pair1), tl.join(pair2, pair3))  # [N, words, i mod 2, i div 2]
    if ASM:
        low, high = pairs.to(tl.int16).to(tl.bfloat16, bitcast=True), (pairs >> 16).to(tl.int16)
        values = tl.join(low, high.to(tl.bfloat16, bitcast=True))
    else:
        values = tl.join(_low(pairs), _high(pairs))
    values = tl.reshape(values, [ROWS, GROUPS, 4, 4, 2, 2, 2])  # rows, groups, t, w, i mod 2, i div 2, j
    return tl.reshape(tl.permute(values, 0, 1, 3, 5, 4, 2, 6), [ROWS, WORDS * 8])


@triton.jit
def _products(a, b, ASM: tl.constexpr):
    """Multiply pairs of bf16 numbers in int32. Products that are not exact are rounded if ``ASM``, else cut off."""
    if ASM:
        return tl.inline_asm_elementwise(
            "mul.rn.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
        )
    low = (_low(a) * _low(b)).to(tl.int32, bitcast=True)
    high = (_high(a) * _high(b)).to(tl.int32, bitcast=True)
    return ((low >> 16) & 0xFFFF) | (high & -0x10000)


@triton.jit
def _low(pairs):
    return (pairs << 16).to(tl.float32, bitcast=True)


@triton.jit
def _high(pairs):
    return (pairs & -0x10000).to(tl.float32, bitcast=True)
