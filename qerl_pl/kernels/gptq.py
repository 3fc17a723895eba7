"""Triton kernel of GPTQ: round some neighbouring columns of a weight one after the other, and compensate the rounding
errors of each in those that follow. ``qerl_pl.quant.rounding`` computes the same in plain PyTorch, with about 17 kernel
launches per column, which take longer than their arithmetic.

Each program has some rows of the weight in registers, because rows do not depend on each other.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false, reportOperatorIssue=false
# Triton's type hints do not have its launch options and scalars.
import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, WARPS = 16, 4  # rows per program; warps per program


def round_columns(
    weight: Tensor, scale: Tensor, factor: Tensor, limits: Tensor, values: Tensor, columns: slice
) -> tuple[Tensor, Tensor]:
    """Round some columns of a weight by GPTQ, with the arguments and results of ``quant.rounding.round_columns``; the
    weight and the scales must be contiguous. On a GPU a product and a sum may be rounded once instead of twice, so a
    weight about halfway between two values may be rounded to the other one than in plain PyTorch."""
    assert weight.is_contiguous(), weight.stride()
    assert scale.is_contiguous(), scale.stride()
    (rows, width), start = weight.shape, columns.start
    count, corner = columns.stop - start, factor[columns, columns].contiguous()
    places = torch.empty(rows, count, dtype=torch.uint8, device=weight.device)
    errors = torch.empty(rows, count, dtype=torch.float32, device=weight.device)
    with torch.cuda.device_of(weight):
        _round_columns[(triton.cdiv(rows, ROWS),)](
            *(weight, scale, corner, limits, values, places, errors, rows, width, start, count),
            COLUMNS=triton.next_power_of_2(count),
            ROWS=ROWS,
            num_warps=WARPS,
        )
    return places, errors


@triton.jit
def _round_columns(
    weight,
    scale,
    corner,
    limits,
    values,
    places,
    errors,
    rows,
    width,
    start,
    count,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < count)[None, :]
    place = row[:, None] * width + start + column[None, :]
    left = tl.load(weight + place, mask=inside, other=0.0)
    by = tl.load(scale + place, mask=inside, other=1.0)
    all_places = tl.full([ROWS, COLUMNS], 0, tl.int32)
    all_errors = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
    for k in range(count):
        here = (column == k)[None, :]
        # Column k: sums of one element of each row and zeros. Triton's interpreter has no tl.sum.
        value = tl.reduce(tl.where(here, left, 0.0), 1, tl.standard._sum_combine)
        unit = tl.reduce(tl.where(here, by, 0.0), 1, tl.standard._sum_combine)
        quotient = tl.where(unit > 0, tl.div_rn(value, tl.where(unit > 0, unit, 1.0)), value * 1e38)
        rank = tl.full([ROWS], 0, tl.int32)
        for j in tl.static_range(15):
            rank += (quotient > tl.load(limits + j)).to(tl.int32)
        wrong = value - tl.load(values + rank) * unit
        error = tl.div_rn(wrong, tl.load(corner + k * count + k))
        effect = tl.load(corner + k * count + column, mask=column < count, other=0.0)
        left -= error[:, None] * effect[None, :]  # 0 in earlier columns
        all_places = tl.where(here, rank[:, None], all_places)
        all_errors = tl.where(here, error[:, None], all_errors)
    out = row[:, None] * count + column[None, :]
    tl.store(places + out, all_places.to(tl.uint8), mask=inside)
    tl.store(errors + out, all_errors, mask=inside)
