"""GPTQ (arXiv 2210.17323): round a weight column by column, and compensate each column's rounding error in the columns
that are not rounded yet."""

from __future__ import annotations

import torch
from torch import Tensor

from qerl_pl.quant.formats import Format, pack

_COLUMNS = 128  # columns that are rounded before their corrections are applied to the rest of the matrix


def gptq_codes(
    weight: Tensor,
    fmt: Format,
    block_scale: Tensor,
    global_scale: Tensor,
    second_moment: Tensor,
    *,
    damping: float = 0.01,
) -> Tensor:
    """Find packed codes that approximately minimise the output error |X W^T - X W'^T|^2, where X is the layer's inputs
    and W' the rounded weight, under given block and tensor scales.

    Since the scales are given, columns can be rounded in the order of the mean square of their inputs, the largest
    first, although neighbouring columns share a scale.

    Args:
        weight: [N, K] floating.
        fmt: format of the codes.
        block_scale: [N, K/block] bits of the block scales.
        global_scale: [] tensor scale.
        second_moment: [K, K] X^T X, or a positive multiple of it.
        damping: share of the mean of the second moment's diagonal that is added to this diagonal.

    Returns:
        [N, K/2] uint8.
    """
    order = second_moment.diagonal().argsort(descending=True)
    weight = weight[:, order].float()  # a copy
    scale = fmt.effective_scale(block_scale, global_scale).repeat_interleave(fmt.block, dim=1)[:, order]  # [N, K]
    factor = inverse_factor(second_moment[order][:, order], damping)
    codes = torch.empty_like(weight, dtype=torch.uint8)
    values = torch.tensor(fmt.values, device=weight.device)
    for start in range(0, weight.shape[1], _COLUMNS):
        stop = min(start + _COLUMNS, weight.shape[1])
        errors = torch.empty_like(weight[:, start:stop])
        for k in range(start, stop):
            codes[:, k] = fmt.encode(weight[:, k], scale[:, k])
            rounded = values[codes[:, k].int()] * scale[:, k]
            errors[:, k - start] = (weight[:, k] - rounded) / factor[k, k]
            weight[:, k:stop] -= torch.outer(errors[:, k - start], factor[k, k:stop])
        weight[:, stop:] -= errors @ factor[start:stop, stop:]
    return pack(codes[:, order.argsort()])


def inverse_factor(second_moment: Tensor, damping: float) -> Tensor:
    """Compute the upper triangular U, [K, K] fp32, with U^T U = (H + damping mean(diag H) I)^-1.

    H is the second moment. Inputs that were always zero in the calibration data get a positive diagonal element in H,
    so they do not affect other columns. Arithmetic is fp64, because outlier channels spread the spectrum of H over many
    orders of magnitude.
    """
    moment = second_moment.to(torch.float64, copy=True)
    diagonal = moment.diagonal()
    mean = diagonal.mean()
    diagonal += torch.where(diagonal > 0, damping * mean, torch.where(mean > 0, mean, 1.0))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(moment))
    return torch.linalg.cholesky(inverse, upper=True).float()
