"""Triton kernels for the element-wise work of a mixture of experts, each in one pass over its tensors;
``qerl_pl.quant.grouped`` defines what they compute. Letters: T tokens, k experts per token, S = k T rows sorted by
expert."""

# pyright: reportCallIssue=false, reportOperatorIssue=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false
# Triton's type hints do not have its launch options, scalars and static_range.
import triton
import triton.language as tl
from torch import Tensor

from qerl_pl.kernels.launching import launch

BLOCK, WARPS = 1024, 4  # columns and warps per program: each thread loads 16 bytes per row of a 16-bit dtype


def summed(rows: Tensor, inverse: Tensor, weights: Tensor | None) -> Tensor:
    """Add the k rows of each token, contiguous [S, N], times their weights [T, k] (None: 1), given the places of the
    token's rows, contiguous ``inverse`` [T, k] int64: [T, N]; equals ``grouped.summed`` bit for bit."""
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
