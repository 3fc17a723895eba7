"""Methods of rounding a weight to a 4-bit format, and measures of the errors: "rtn" rounds to nearest; "gptq" searches
for good block scales and compensates rounding errors in other columns by GPTQ (arXiv 2210.17323).

Letters: N outputs, K inputs of a linear layer.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from qerl_pl.model.quantization import Method
from qerl_pl.quant.formats import Format, PackedWeight, pack, quantize, row_chunks

_COLUMNS = 128  # columns that GPTQ rounds before it applies their corrections to the rest of the matrix


def pack_group(
    weights: Mapping[str, Tensor], fmt: Format, method: Method, second_moment: Tensor | None
) -> dict[str, PackedWeight]:
    """Round the weights [N, K] of linear layers with a common input, by name, to a 4-bit format with one tensor scale.

    "rtn" rounds to nearest with min-max block scales. "gptq" needs ``second_moment``, the mean [K, K] of x x^T over the
    inputs x: it searches for the block scales with the smallest squared error, weighted by each input's mean square
    (``search_scales``), and then rounds by ``gptq_codes``.
    """
    shared = group_scale(list(weights.values()), fmt)
    packed = {name: quantize(weight, fmt, shared, name=f"{name}.weight") for name, weight in weights.items()}
    if method == "gptq":
        assert second_moment is not None
        importance, order = second_moment.diagonal().float(), column_order(second_moment)
        for name, weight in weights.items():
            scale = search_scales(weight, fmt, packed[name].block_scale, shared, importance)
            packed[name] = PackedWeight(gptq_codes(weight, fmt, scale, shared, *order), scale, shared)
    return packed


def pack_groups(groups: Sequence[Mapping[str, Tensor]], fmt: Format) -> dict[str, PackedWeight]:
    """Round several groups of weight matrices to the nearest values of a 4-bit format, such as those of all experts of
    a block; the matrices of one group share a tensor scale. All matrices must have equally many columns. The results,
    by layer name, equal those of one call of ``pack_group`` with method "rtn" per group bit for bit, with far fewer
    kernel launches on a GPU."""
    weights = {name: weight for group in groups for name, weight in group.items()}
    scales = [group_scale(list(group.values()), fmt) for group in groups]
    scale_of = {name: scale for group, scale in zip(groups, scales, strict=True) for name in group}
    sizes = [len(weight) for weight in weights.values()]
    rows = torch.tensor(sizes, device=scales[0].device)
    by_row = torch.stack([scale_of[name] for name in weights]).repeat_interleave(rows, output_size=sum(sizes))
    whole = quantize(torch.cat([*weights.values()]), fmt, by_row)
    parts = zip(weights, whole.codes.split(sizes), whole.block_scale.split(sizes), strict=True)
    return {name: PackedWeight(codes, block_scale, scale_of[name]) for name, codes, block_scale in parts}


def group_scale(weights: Sequence[Tensor], fmt: Format) -> Tensor:
    """Compute the common tensor scale, [], of several weights from their largest magnitude."""
    return fmt.tensor_scale(torch.stack([weight.abs().amax().float() for weight in weights]).amax())


def output_error(weight: Tensor, rounded: Tensor, second_moment: Tensor) -> float:
    """Compute the mean of |(W' - W) x|^2 over inputs x. ``weight`` is W [N, K]; ``rounded`` is W' [N, K] fp32, which is
    overwritten; ``second_moment`` is the mean [K, K] of x x^T."""
    error = rounded.sub_(weight)
    return (error @ second_moment.to(error.dtype)).mul_(error).sum().item()


def search_scales(weight: Tensor, fmt: Format, block_scale: Tensor, global_scale: Tensor, importance: Tensor) -> Tensor:
    """Choose each block scale of a weight [N, K] among those that ``fmt.nearby_scales`` yields: the one for which the
    rounding error sum_k importance_k (w_k - rounded w_k)^2 over the block's columns k is smallest. ``importance``, [K]
    fp32 and not negative, is for example the mean square of each input. ``block_scale`` [N, K/block] has the bits of
    the initial scales, which are kept where no other scale is better. Returns the bits of the chosen scales, [N,
    K/block]."""
    best = block_scale.clone()
    values = torch.tensor(fmt.values, device=weight.device)
    for rows in row_chunks(weight):
        blocks = weight[rows].float().unflatten(1, (-1, fmt.block))  # [n, K/block, block]
        least = torch.full_like(best[rows], torch.inf, dtype=torch.float32)
        for bits in fmt.nearby_scales(block_scale[rows]):
            scale = fmt.effective_scale(bits, global_scale).unsqueeze(-1)
            error = (values[fmt.encode(blocks, scale).int()] * scale).sub_(blocks).square_()
            error = error.mul_(importance.unflatten(0, (-1, fmt.block))).sum(-1)  # [n, K/block]
            best[rows] = torch.where(error < least, bits, best[rows])
            least = torch.minimum(error, least)
    return best


def column_order(second_moment: Tensor) -> tuple[Tensor, Tensor]:
    """Choose the order in which GPTQ rounds the columns of weights, [K] int64, and compute ``inverse_factor`` of the
    inputs' second moment [K, K] with rows and columns in this order, [K, K] fp32.

    GPTQ compensates each column's rounding error in the columns that are not rounded yet. As the scales are fixed
    beforehand, columns may be rounded in any order although neighbours share a scale: those whose inputs have the
    largest mean squares come first, while most columns are left to compensate.
    """
    order = second_moment.diagonal().argsort(descending=True)
    return order, inverse_factor(second_moment[order][:, order])


def gptq_codes(
    weight: Tensor, fmt: Format, block_scale: Tensor, global_scale: Tensor, order: Tensor, factor: Tensor
) -> Tensor:
    """Round a weight W [N, K] by GPTQ with given scales: 4-bit codes, two per byte, [N, K/2] uint8, that approximately
    minimise |X W^T - X W'^T|^2. ``order`` and ``factor`` are the results of ``column_order`` for X^T X, or a positive
    multiple of it, where X are the inputs.
    """
    weight = weight[:, order].float()  # a copy
    scale = fmt.effective_scale(block_scale, global_scale).repeat_interleave(fmt.block, dim=1)[:, order]  # [N, K]
    codes, limits = (tensor.to(weight.device) for tensor in rounding_limits(fmt))
    values = torch.tensor(fmt.values, device=weight.device)[codes.int()]
    rounder = round_columns
    if weight.is_cuda:
        from qerl_pl.kernels import gptq  # needs Triton

        rounder = gptq.round_columns
    places = torch.empty_like(weight, dtype=torch.uint8)
    for start in range(0, weight.shape[1], _COLUMNS):
        stop = min(start + _COLUMNS, weight.shape[1])
        places[:, start:stop], errors = rounder(weight, scale, factor, limits, values, slice(start, stop))
        weight[:, stop:] -= errors @ factor[start:stop, stop:]
    return pack(codes[places.int()][:, order.argsort()])


def round_columns(
    weight: Tensor, scale: Tensor, factor: Tensor, limits: Tensor, values: Tensor, columns: slice
) -> tuple[Tensor, Tensor]:
    """Round the C columns ``columns`` of a weight [N, K], one after the other, and compensate each error in those of
    the C columns that follow (GPTQ, arXiv 2210.17323, algorithm 1).

    Args:
        weight: [N, K] fp32, not changed.
        scale: [N, K] fp32, by which the values of a column's codes are multiplied.
        factor: [K, K] fp32, upper triangular (``inverse_factor``).
        limits: [15] fp32; of the format's values in ascending order, a weight gets the one at the place p if p of the
            limits are smaller than the weight divided by its scale (``rounding_limits``).
        values: [16] fp32, the format's values in ascending order.

    Returns:
        The places of the rounded weights among ``values``, [N, C] uint8, and their errors divided by the factor's
        diagonal, [N, C] fp32.
    """
    left, by, corner = weight[:, columns].clone(), scale[:, columns], factor[columns, columns]
    places, errors = torch.empty_like(left, dtype=torch.uint8), torch.empty_like(left)
    for k in range(left.shape[1]):
        unit = by[:, k]
        quotient = torch.where(unit > 0, left[:, k] / unit, left[:, k] * 1e38)  # NF4's blocks of zeros have scale 0
        place = torch.bucketize(quotient, limits)
        places[:, k] = place
        errors[:, k] = (left[:, k] - values[place] * unit) / corner[k, k]
        left[:, k:] -= torch.outer(errors[:, k], corner[k, k:])
    return places, errors


@cache
def rounding_limits(fmt: Format) -> tuple[Tensor, Tensor]:
    """Return how a format rounds numbers to its values: its codes in ascending order of their values, [16] uint8, and
    limits, [15] fp32. A weight whose block has the scale 1 is rounded to the code at place p if p limits are smaller
    than the weight. Both are on the CPU. A limit is the largest fp32 number that ``fmt.encode`` rounds to a lower
    place; it is found by bisection."""
    codes = sorted(range(16), key=lambda code: (fmt.values[code], math.copysign(1.0, fmt.values[code])))
    place_of = torch.tensor(codes, device="cpu").argsort()
    below, one = torch.arange(15, device="cpu"), torch.ones((), dtype=torch.float32, device="cpu")
    # The rank of an fp32 number among all is the integer of its bits or, if it is negative, minus that of -number.
    high = torch.full((15,), 0x7F7FFFFF, dtype=torch.int64, device="cpu")
    low = -high
    while (high - low > 1).any():
        middle = (low + high) // 2
        is_lower = place_of[fmt.encode(_number(middle), one).int()] <= below
        low, high = torch.where(is_lower, middle, low), torch.where(is_lower, high, middle)
    return torch.tensor(codes, dtype=torch.uint8, device="cpu"), _number(low)


def _number(rank: Tensor) -> Tensor:
    return rank.abs().int().view(torch.float32) * rank.sign()


def inverse_factor(second_moment: Tensor, damping: float = 0.01) -> Tensor:
    """Compute the upper triangular U, [K, K] fp32, with U^T U = (H + damping mean(diag H) I)^-1; H is the second
    moment. Inputs that were always zero get a positive diagonal element, so they do not affect other columns."""
    # fp64, because outlier channels spread the spectrum of H over many orders of magnitude.
    moment = second_moment.to(torch.float64, copy=True)
    diagonal = moment.diagonal()
    mean = diagonal.mean()
    diagonal += torch.where(diagonal > 0, damping * mean, torch.where(mean > 0, mean, 1.0))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(moment))
    return torch.linalg.cholesky(inverse, upper=True).float()


@dataclass(frozen=True)
class LayerReport:
    """Quantisation errors of one linear layer; relative errors are RMS of the error over RMS of the exact values."""

    name: str
    shape: tuple[int, int]
    weight_error: float
    """Relative error of the weights."""
    max_error: float
    """Largest error of a weight, divided by the largest weight."""
    outlier_ratio: float
    """Largest magnitude of a weight, divided by the root mean square of the weights."""
    output_error: float | None = None
    """Relative error of the layer's outputs for calibration data, on inputs that the previous blocks compute with
    quantised weights; None: not measured."""


def report_layer(
    name: str, weight: Tensor, packed: PackedWeight, fmt: Format, second_moment: Tensor | None = None
) -> LayerReport:
    """Return a report on the errors of a 4-bit weight relative to the dense weight [N, K]. With ``second_moment``, the
    mean [K, K] of x x^T over the layer's inputs x, it includes the relative error of the layer's outputs."""
    weight = weight.float()
    rounded = fmt.dequantize(packed, torch.float32)
    error, norm, largest = rounded - weight, weight.norm().item(), weight.abs().max().item()
    of_output = None
    if second_moment is not None:
        power = output_error(weight, torch.zeros_like(weight), second_moment)
        of_output = _ratio(output_error(weight, rounded, second_moment), power) ** 0.5
    return LayerReport(
        name=name,
        shape=(weight.shape[0], weight.shape[1]),
        weight_error=_ratio(error.norm().item(), norm),
        max_error=_ratio(error.abs().max().item(), largest),
        outlier_ratio=_ratio(largest, norm / weight.numel() ** 0.5),
        output_error=of_output,
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
