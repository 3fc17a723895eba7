"""GPTQ (arXiv 2210.17323): round column by column, and let the columns to come make up for each error."""

from __future__ import annotations

import torch
from torch import Tensor

from qerl_pl.quant.formats import Format, pack

_COLUMNS = 128  # columns whose corrections are gathered before they reach the rest of the matrix


def gptq_codes(
    weight: Tensor,
    fmt: Format,
    block_scale: Tensor,
    global_scale: Tensor,
    second_moment: Tensor,
    *,
    damping: float = 0.01,
) -> Tensor:
    """[N, K/2] packed codes that nearly minimise |X W^T - X W'^T|^2 under given scales.

    Scales are fixed beforehand, so columns may be taken in the order of their importance (the largest mean square
    first) although they share scales with their neighbours in memory.

    Args:
        weight: [N, K] floating.
        fmt: of the codes.
        block_scale: [N, K/block] bits.
        global_scale: [] multiplier.
        second_moment: [K, K] X^T X, up to a factor.
        damping: share of the mean of the diagonal that is added to it.
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
    """[K, K] fp32 upper U with U^T U = (H + damping mean(diag H) I)^-1; inputs that were always zero count as alone.

    Computed in fp64: outlier channels spread the spectrum of H over many decades.
    """
    moment = second_moment.to(torch.float64, copy=True)
    diagonal = moment.diagonal()
    mean = diagonal.mean()
    diagonal += torch.where(diagonal > 0, damping * mean, torch.where(mean > 0, mean, 1.0))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(moment))
    return torch.linalg.cholesky(inverse, upper=True).float()
