"""AWQ (arXiv 2306.00978): multiply important input channels before quantisation, and divide the module before.

The input channels of linears are multiplied by scales, and the output channels of the norm or linear that computes
these inputs are divided by them. Scales are powers of two, so both are exact in every floating dtype and the dense
model computes the same bits as before. Finer scales lowered the error by at most 3 % on random layers.

Norm weights change, so noise of a given absolute size on them has another relative size than on the original model.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qerl_pl.base.family import Family
from qerl_pl.quant.formats import Format
from qerl_pl.quant.rounding import group_scale, output_error, pack_weight

_NUM_EXPONENTS = 10


@dataclass(frozen=True)
class Fold:
    """Record of input scales that were applied to linears and to the module before them."""

    into: str
    """Module whose output channels were divided by the scales."""
    linears: list[str]
    """Linears whose input channels were multiplied by the scales."""
    exponent: float
    """Power of the inputs' root mean squares that gives the scales, before rounding to powers of two; 0: no change."""
    smallest: float
    largest: float


def fold_block(
    block: str,
    tensors: MutableMapping[str, Tensor],
    second_moments: MutableMapping[str, Tensor],
    fmt: Format,
    *,
    family: Family,
    head_dim: int,
) -> list[Fold]:
    """Rescale the weights of a decoder block such that the output error of its packed linears is least.

    Args:
        block: name of the block, e.g. "model.layers.3".
        tensors: the block's weights by full name; changed weights are replaced in this mapping.
        second_moments: measured [K, K] mean of x x^T by the name of the first linear of each group with a common input;
            replaced by that of the scaled inputs. Other groups are not changed.
        fmt: format to which the linears will be packed.
        family: description of the model's blocks; ``Family.scale_sources`` names the module before each group.
        head_dim: channels per attention head.

    Returns:
        One record per group.

    Raises:
        ValueError: a measured linear has no module before it into which scales can be folded.
    """
    known = {f"{block}.{linear}" for group, _ in family.scale_sources for linear in group}
    if unknown := second_moments.keys() - known:
        raise ValueError(f"awq knows no norm or linear before {sorted(unknown)}; add them to ignore, or use gptq")
    folds = []
    for group, source in family.scale_sources:
        into = f"{block}.{source}"
        linears = [name for linear in group if f"{(name := f'{block}.{linear}')}.weight" in tensors]
        if not linears or linears[0] not in second_moments:
            continue
        moment = second_moments[linears[0]]
        weights = [tensors[f"{linear}.weight"] for linear in linears]
        repeats = weights[0].shape[1] // len(tensors[f"{into}.weight"])  # query heads per value head
        exponent, scales = best_scales(weights, moment, fmt, repeats=repeats, head_dim=head_dim)
        apply_scales(tensors, scales, into=into, linears=linears, repeats=repeats, head_dim=head_dim)
        second_moments[linears[0]] = moment / torch.outer(scales, scales)
        folds.append(Fold(into, linears, exponent, scales.min().item(), scales.max().item()))
    return folds


def apply_scales(
    tensors: MutableMapping[str, Tensor],
    scales: Tensor,
    *,
    into: str,
    linears: Sequence[str],
    repeats: int = 1,
    head_dim: int = 1,
) -> None:
    """Multiply the input channels of linears, and divide the output channels of the module before them.

    Args:
        tensors: weights by full name; changed weights are replaced in this mapping.
        scales: [K] fp32 powers of two.
        into: norm or linear whose output is the input of the linears.
        linears: the linears.
        repeats: query heads per value head if ``into`` is v_proj; the scales of these heads must be equal.
        head_dim: channels per head.
    """
    for linear in linears:
        weight = tensors[f"{linear}.weight"]
        tensors[f"{linear}.weight"] = weight * scales.to(weight.dtype)
    divisor = scales.view(-1, repeats, head_dim)[:, 0].flatten() if repeats > 1 else scales
    for name in (f"{into}.weight", f"{into}.bias"):
        if name in tensors:
            tensor = tensors[name]
            tensors[name] = tensor / divisor.to(tensor.dtype).view(-1, *[1] * (tensor.ndim - 1))


def best_scales(
    weights: Sequence[Tensor], second_moment: Tensor, fmt: Format, *, repeats: int = 1, head_dim: int = 1
) -> tuple[float, Tensor]:
    """Search the exponent whose scales give the least output error after rounding.

    Args:
        weights: [N_i, K] each, of linears that share an input.
        second_moment: [K, K] mean of x x^T over inputs x.
        fmt: format to round to.
        repeats: consecutive heads of the input that must have equal scales, because one value head computes them.
        head_dim: channels per head.

    Returns:
        The exponent, and the scales [K] fp32.
    """
    mean_square = second_moment.diagonal().view(-1, repeats, head_dim if repeats > 1 else 1).mean(1, keepdim=True)
    rms = mean_square.expand(-1, repeats, -1).flatten().sqrt()
    rms = rms.clamp_min(1e-4 * rms.max()).clamp_min(torch.finfo(torch.float32).tiny)
    exponents = [i / _NUM_EXPONENTS for i in range(_NUM_EXPONENTS + 1)]
    candidates = [torch.exp2((exponent * (rms.log2() - rms.log2().mean())).round()) for exponent in exponents]
    errors = [_rounded_error(weights, second_moment, fmt, scales) for scales in candidates]
    best = errors.index(min(errors))
    return exponents[best], candidates[best]


def _rounded_error(weights: Sequence[Tensor], second_moment: Tensor, fmt: Format, scales: Tensor) -> float:
    moment = second_moment / torch.outer(scales, scales)
    scaled = [weight * scales.to(weight.dtype) for weight in weights]
    shared = group_scale(scaled, fmt)
    packed = [pack_weight(weight, fmt, shared, "mse", moment) for weight in scaled]
    return sum(
        output_error(weight, fmt.dequantize(p, torch.float32), moment) for weight, p in zip(scaled, packed, strict=True)
    )
