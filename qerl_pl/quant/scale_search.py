"""Search block scales that minimise the squared rounding error of each block; min-max scales represent its largest
weight instead."""

from __future__ import annotations

import torch
from torch import Tensor

from qerl_pl.quant.formats import Format, row_chunks


def search_scales(
    weight: Tensor, fmt: Format, block_scale: Tensor, global_scale: Tensor, importance: Tensor | None = None
) -> Tensor:
    """Choose, for every block of a weight, the candidate scale with the smallest sum_k importance_k (w_k - rounded
    w_k)^2 over the block's columns k.

    Args:
        weight: [N, K] floating.
        fmt: format; its function ``nearby_scales`` gives the candidate scales.
        block_scale: [N, K/block] bits of the initial scales, which are kept if no candidate is better.
        global_scale: [] tensor scale.
        importance: [K] fp32, not negative, e.g. the mean square of each input; None means equal weights.

    Returns:
        [N, K/block] bits of the chosen block scales.
    """
    best = block_scale.clone()
    values = torch.tensor(fmt.values, device=weight.device)
    for rows in row_chunks(weight):
        blocks = weight[rows].float().unflatten(1, (-1, fmt.block))  # [n, K/block, block]
        least = torch.full_like(best[rows], torch.inf, dtype=torch.float32)
        for bits in fmt.nearby_scales(block_scale[rows]):
            scale = fmt.effective_scale(bits, global_scale).unsqueeze(-1)
            error = (values[fmt.encode(blocks, scale).int()] * scale).sub_(blocks).square_()
            if importance is not None:
                error *= importance.unflatten(0, (-1, fmt.block))
            error = error.sum(-1)  # [n, K/block]
            best[rows] = torch.where(error < least, bits, best[rows])
            least = torch.minimum(error, least)
    return best
