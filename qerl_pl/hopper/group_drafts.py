"""Triton kernels that draft tokens for speculative decoding without a draft model: the tokens that follow an earlier
occurrence of a sequence's last tokens, in the sequence itself or in other completions of its prompt.

The tokens of all sequences are in one tensor, with a row for each sequence. The first kernel finds the longest match in
each block of 256 positions of each row. The second takes the best of all and copies the tokens that follow it. Drafts
use no random numbers and no clock, and do not depend on the order of the rows, so equal calls give equal drafts.
"""

# pyright: reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
# Triton's type hints do not have its launch options, scalars and loops.
import torch
import triton
import triton.language as tl
from torch import Tensor

from qerl_pl.hopper.token_scores import _max
from qerl_pl.kernels.launching import launch

LONGEST_MATCH = 8
BLOCK = 256  # positions per program
POSITION_BITS, COLUMN_BITS = 24, 12


def draft(tokens: Tensor, lengths: Tensor, candidates: Tensor, rows: Tensor, num_drafts: int) -> Tensor:
    """Draft tokens for N sequences for speculative decoding: [N, num_drafts] int64.

    A sequence's drafts are the tokens that follow an occurrence of its last m tokens, in the sequence itself or in
    other sequences, for the largest m up to ``LONGEST_MATCH`` that occurs. Of several occurrences, the one at the
    latest position is taken; of several at that position, the one in the row that ``candidates`` lists first. If
    nothing matches, or where the row that matches has no further tokens, the drafts repeat the sequence's last token.

    Args:
        tokens: [R, L] int32, the tokens of R sequences of at most L tokens, with stride 1 along L.
        lengths: [R] int32, number of tokens of each row, at least 1 for rows that are read.
        candidates: [R, C] int32, for each row up to C rows in which to look for its last tokens, usually including the
            row itself; unused entries are -1.
        rows: [N] int64, the rows of the N sequences.
        num_drafts: drafts per sequence, at least 1.
    """
    num, length, columns = len(rows), tokens.shape[1], candidates.shape[1]
    assert length < 1 << POSITION_BITS, length
    assert columns < 1 << COLUMN_BITS, columns
    blocks = triton.cdiv(length, BLOCK)
    best = torch.empty(num, columns, blocks, dtype=torch.int64, device=tokens.device)
    drafts = torch.empty(num, num_drafts, dtype=torch.int64, device=tokens.device)
    if num:
        arguments = tokens, lengths, candidates, rows, best, tokens.stride(0), columns
        constants = {"BLOCK": BLOCK, "LONGEST": LONGEST_MATCH, "POSITION": POSITION_BITS, "COLUMN": COLUMN_BITS}
        launch(_match_kernel, (num, columns, blocks), arguments, constants, num_warps=4)
        arguments = tokens, lengths, candidates, rows, best, drafts, tokens.stride(0), columns, columns * blocks
        places = {"PLACES": triton.next_power_of_2(columns * blocks), "DRAFTS": triton.next_power_of_2(num_drafts)}
        bits = {"NUM_DRAFTS": num_drafts, "POSITION": POSITION_BITS, "COLUMN": COLUMN_BITS}
        launch(_copy_kernel, (num,), arguments, places | bits, num_warps=4)
    return drafts


@triton.jit
def _match_kernel(
    tokens,
    lengths,
    candidates,
    rows,
    best,
    stride,
    columns,
    BLOCK: tl.constexpr,
    LONGEST: tl.constexpr,
    POSITION: tl.constexpr,
    COLUMN: tl.constexpr,
):
    """Find the best occurrence of a sequence's last tokens in ``BLOCK`` positions of one row, and write it as one
    integer, the larger the better: the number of matching tokens, the position of the last of them, and the place of
    the row in ``candidates`` (lower is better). 0 means that nothing matches."""
    sequence, column, block = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    place = (sequence * columns + column) * tl.num_programs(2) + block
    row = tl.load(rows + sequence)
    other = tl.load(candidates + row * columns + column).to(tl.int64)
    length = tl.load(lengths + row)
    last = tl.load(lengths + other, mask=other >= 0, other=0) - 2  # a token follows it
    found = tl.full((), 0, tl.int64)
    if block * BLOCK <= last:
        position = block * BLOCK + tl.arange(0, BLOCK)
        matches = position <= last
        match = tl.full((BLOCK,), 0, tl.int64)
        for back in tl.static_range(LONGEST):
            due = tl.load(tokens + row * stride + length - 1 - back, mask=length > back, other=-1)
            inside = matches & (position >= back)
            matches = inside & (tl.load(tokens + other * stride + position - back, mask=inside, other=-2) == due)
            match += matches.to(tl.int64)
        rank = ((match << POSITION | position) << COLUMN) + (1 << COLUMN) - 1 - column
        found = _max(tl.where(match > 0, rank, 0))
    tl.store(best + place, found)


@triton.jit
def _copy_kernel(
    tokens,
    lengths,
    candidates,
    rows,
    best,
    drafts,
    stride,
    columns,
    places,
    PLACES: tl.constexpr,
    DRAFTS: tl.constexpr,
    NUM_DRAFTS: tl.constexpr,
    POSITION: tl.constexpr,
    COLUMN: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + sequence)
    place = tl.arange(0, PLACES)
    rank = _max(tl.load(best + sequence * places + place, mask=place < places, other=0))
    column = (1 << COLUMN) - 1 - (rank & ((1 << COLUMN) - 1))
    position = (rank >> COLUMN) & ((1 << POSITION) - 1)
    other = tl.load(candidates + row * columns + column, mask=rank > 0, other=0).to(tl.int64)
    after = position + 1 + tl.arange(0, DRAFTS)
    is_known = after < tl.load(lengths + other, mask=rank > 0, other=0)
    found = tl.load(tokens + other * stride + after, mask=is_known, other=0)
    last = tl.load(tokens + row * stride + tl.load(lengths + row) - 1)
    number = tl.arange(0, DRAFTS)
    tl.store(drafts + sequence * NUM_DRAFTS + number, tl.where(is_known, found, last), mask=number < NUM_DRAFTS)
