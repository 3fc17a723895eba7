"""Block scales that minimise the squared error of a block, instead of reaching its largest weight."""

from __future__ import annotations

import torch
from torch import Tensor

from qerl_pl.quant.formats import Format, row_chunks


def search_scales(
    weight: Tensor, fmt: Format, block_scale: Tensor, global_scale: Tensor, importance: Tensor | None = None
) -> Tensor:
    """The best of a format's nearby scales for every block, by sum_k importance_k (w_k - rounded w_k)^2.

    Args:
        weight: [N, K] floating.
        fmt: of the scales.
        block_scale: [N, K/block] bits of the scales to start from; they stay where nothing nearby is better.
        global_scale: [] multiplier.
        importance: [K] fp32, at least 0, e.g. the mean square of each input; None: all alike.

    Returns:
        [N, K/block] bits.
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
