"""GPTQ (arXiv 2210.17323): round column by column, and compensate each error in the columns not yet rounded."""

from __future__ import annotations

import torch
from torch import Tensor

from qerl_pl.quant.formats import Format, pack

_COLUMNS = 128  # columns whose corrections are accumulated before they are applied to the rest of the matrix


def gptq_codes(
    weight: Tensor,
    fmt: Format,
    block_scale: Tensor,
    global_scale: Tensor,
    second_moment: Tensor,
    *,
    damping: float = 0.01,
) -> Tensor:
    """Find packed codes that approximately minimise the output error |X W^T - X W'^T|^2 under given scales.

    Since the scales are given, columns can be rounded in the order of the mean square of their inputs, the largest
    first, although neighbouring columns share a scale.

    Args:
        weight: [N, K] floating.
        fmt: format of the codes.
        block_scale: [N, K/block] bits of the block scales.
        global_scale: [] tensor scale.
        second_moment: [K, K] X^T X, up to a factor.
        damping: share of the mean of the diagonal that is added to the diagonal.

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

    Inputs that were always zero get a positive diagonal element instead, so they are uncorrelated with other inputs.
    Arithmetic is fp64, because outlier channels spread the spectrum of H over many orders of magnitude.
    """
    moment = second_moment.to(torch.float64, copy=True)
    diagonal = moment.diagonal()
    mean = diagonal.mean()
    diagonal += torch.where(diagonal > 0, damping * mean, torch.where(mean > 0, mean, 1.0))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(moment))
    return torch.linalg.cholesky(inverse, upper=True).float()
