"""The ways to round a weight to a format: to nearest, under searched scales, with second-order corrections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from qerl_pl.quant.formats import Format, PackedWeight, quantize, round_codes
from qerl_pl.quant.gptq import gptq_codes
from qerl_pl.quant.scale_search import search_scales

Rounding = Literal["rtn", "mse", "gptq"]
"""rtn: nearest under min-max scales. mse: nearest under the scales of least squared error; where inputs are known, each
column is weighted by its mean square, and a row keeps its min-max scales if its outputs are better under them. gptq:
GPTQ under the scales of least weighted squared error."""


def pack_weight(
    weight: Tensor,
    fmt: Format,
    global_scale: Tensor,
    rounding: Rounding,
    second_moment: Tensor | None,
    *,
    name: str = "weight",
) -> PackedWeight:
    """Pack a weight [N, K] under a given tensor scale.

    Args:
        weight: [N, K] floating.
        fmt: to pack to.
        global_scale: [] multiplier.
        rounding: how.
        second_moment: [K, K] mean of x x^T over the layer's inputs; None: not known, which gptq does not take.
        name: what errors call the weight.

    Raises:
        ValueError: the shape does not fit, or the weight holds NaN or infinity.
    """
    nearest = quantize(weight, fmt, global_scale, name=name)
    if rounding == "rtn":
        return nearest
    importance = None if second_moment is None else second_moment.diagonal()
    scale = search_scales(weight, fmt, nearest.block_scale, global_scale, importance)
    if rounding == "gptq":
        assert second_moment is not None
        return PackedWeight(gptq_codes(weight, fmt, scale, global_scale, second_moment), scale, global_scale)
    searched = PackedWeight(round_codes(weight, fmt, scale, global_scale), scale, global_scale)
    if second_moment is None:
        return searched
    before, after = (row_errors(weight, fmt.dequantize(p, torch.float32), second_moment) for p in (nearest, searched))
    worse = (after > before).unsqueeze(1)  # correlations between inputs can make it so
    codes = torch.where(worse, nearest.codes, searched.codes)
    return PackedWeight(codes, torch.where(worse, nearest.block_scale, scale), global_scale)


def pack_group(
    weights: Mapping[str, Tensor], fmt: Format, rounding: Rounding, second_moment: Tensor | None
) -> dict[str, PackedWeight]:
    """Pack the weights of linears that share their input (name to [N, K]) under one tensor scale."""
    shared = group_scale(list(weights.values()), fmt)
    return {
        name: pack_weight(weight, fmt, shared, rounding, second_moment, name=f"{name}.weight")
        for name, weight in weights.items()
    }


def group_scale(weights: Sequence[Tensor], fmt: Format) -> Tensor:
    """[] tensor scale that suits all of the weights."""
    return fmt.tensor_scale(torch.stack([weight.abs().amax().float() for weight in weights]).amax())


def output_error(weight: Tensor, rounded: Tensor, second_moment: Tensor) -> float:
    """Mean square of (W' - W) x over inputs x, summed over the outputs; see ``row_errors``."""
    return row_errors(weight, rounded, second_moment).sum().item()


def row_errors(weight: Tensor, rounded: Tensor, second_moment: Tensor) -> Tensor:
    """[N] fp32 mean square of each row of (W' - W) x over inputs x.

    Args:
        weight: W [N, K] floating.
        rounded: W' [N, K] fp32; overwritten.
        second_moment: [K, K] mean of x x^T.
    """
    error = rounded.sub_(weight)
    return (error @ second_moment).mul_(error).sum(1)
