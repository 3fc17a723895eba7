"""Methods of rounding a weight to a 4-bit format: to nearest, with searched block scales, or with GPTQ's second-order
corrections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from qerl_pl.quant.formats import Format, PackedWeight, quantize, round_codes
from qerl_pl.quant.gptq import gptq_codes
from qerl_pl.quant.scale_search import search_scales

Rounding = Literal["rtn", "mse", "gptq"]
"""Rounding methods. rtn: to the nearest values under min-max block scales. mse: to the nearest values under the block
scales with the smallest squared error; with calibration data, columns are weighted by the mean square of their input,
and a row of the weight keeps its min-max scales if its output error is smaller with them. gptq: GPTQ under the block
scales with the smallest weighted squared error."""


def pack_weight(
    weight: Tensor,
    fmt: Format,
    global_scale: Tensor,
    rounding: Rounding,
    second_moment: Tensor | None,
    *,
    name: str = "weight",
) -> PackedWeight:
    """Pack a weight [N, K] by a rounding method, under a given tensor scale.

    Args:
        weight: [N, K] floating.
        fmt: format to pack to.
        global_scale: [] tensor scale.
        rounding: rounding method.
        second_moment: [K, K] mean of x x^T over the layer's inputs x; None without calibration data, which gptq does
            not allow.
        name: name of the weight in error messages.

    Raises:
        ValueError: the shape does not fit, or the weight holds NaN or infinity.
    """
    nearest = quantize(weight, fmt, global_scale, name=name)
    if rounding == "rtn":
        return nearest
    importance = None if second_moment is None else second_moment.diagonal().float()
    scale = search_scales(weight, fmt, nearest.block_scale, global_scale, importance)
    if rounding == "gptq":
        assert second_moment is not None
        return PackedWeight(gptq_codes(weight, fmt, scale, global_scale, second_moment), scale, global_scale)
    searched = PackedWeight(round_codes(weight, fmt, scale, global_scale), scale, global_scale)
    if second_moment is None:
        return searched
    before, after = (row_errors(weight, fmt.dequantize(p, torch.float32), second_moment) for p in (nearest, searched))
    worse = (after > before).unsqueeze(1)  # possible because inputs are correlated
    codes = torch.where(worse, nearest.codes, searched.codes)
    return PackedWeight(codes, torch.where(worse, nearest.block_scale, scale), global_scale)


def pack_group(
    weights: Mapping[str, Tensor], fmt: Format, rounding: Rounding, second_moment: Tensor | None
) -> dict[str, PackedWeight]:
    """Pack the weights [N, K] of linears with a common input under a common tensor scale; weights and results are by
    the linear's name."""
    shared = group_scale(list(weights.values()), fmt)
    return {
        name: pack_weight(weight, fmt, shared, rounding, second_moment, name=f"{name}.weight")
        for name, weight in weights.items()
    }


def group_scale(weights: Sequence[Tensor], fmt: Format) -> Tensor:
    """Compute the common tensor scale, [], of several weights from their largest magnitude."""
    return fmt.tensor_scale(torch.stack([weight.abs().amax().float() for weight in weights]).amax())


def output_error(weight: Tensor, rounded: Tensor, second_moment: Tensor) -> float:
    """Compute the mean of |(W' - W) x|^2 over inputs x, for a weight W and the rounded weight W'; arguments as in
    ``row_errors``."""
    return row_errors(weight, rounded, second_moment).sum().item()


def row_errors(weight: Tensor, rounded: Tensor, second_moment: Tensor) -> Tensor:
    """Compute the mean square of each element of (W' - W) x over inputs x, that is, of each row's output error: [N]
    fp32.

    Args:
        weight: W [N, K] floating.
        rounded: the rounded weight W' [N, K] fp32; overwritten.
        second_moment: [K, K] mean of x x^T.
    """
    error = rounded.sub_(weight)
    return (error @ second_moment.to(error.dtype)).mul_(error).sum(1)
