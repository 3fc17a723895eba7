"""Measure the quantisation error of each packed linear, and draw the errors of all of them as a heat map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from qerl_pl.common.files import replacing
from qerl_pl.quant.formats import Format, PackedWeight
from qerl_pl.quant.rounding import output_error

PICTURE = "quantization_report.png"


@dataclass(frozen=True)
class LayerReport:
    """Quantisation errors of one linear. A relative error is the root mean square of the error, divided by that of the
    exact values."""

    name: str
    shape: tuple[int, int]
    weight_error: float
    """Relative error of the weights."""
    max_error: float
    """Largest error of a weight, divided by the largest weight."""
    outlier_ratio: float
    """Largest magnitude of a weight, divided by the root mean square of the weights."""
    output_error: float | None = None
    """Relative error of the linear's outputs for calibration data, whose hidden states come from the already packed
    previous blocks; None: not measured."""


def report_layer(
    name: str, weight: Tensor, packed: PackedWeight, fmt: Format, second_moment: Tensor | None = None
) -> LayerReport:
    """Compute the errors of a packed weight relative to the dense weight [N, K].

    Args:
        name: name of the linear.
        weight: [N, K] floating.
        packed: the packed weight.
        fmt: format of the packed weight.
        second_moment: [K, K] mean of x x^T over the calibration data's inputs x.
    """
    weight = weight.float()
    rounded = fmt.dequantize(packed, torch.float32)
    error = rounded - weight
    norm, largest = weight.norm().item(), weight.abs().max().item()
    rms = norm / weight.numel() ** 0.5
    of_output = None
    if second_moment is not None:
        power = output_error(weight, torch.zeros_like(weight), second_moment)
        of_output = _ratio(output_error(weight, rounded, second_moment), power) ** 0.5
    return LayerReport(
        name=name,
        shape=(weight.shape[0], weight.shape[1]),
        weight_error=_ratio(error.norm().item(), norm),
        max_error=_ratio(error.abs().max().item(), largest),
        outlier_ratio=_ratio(largest, rms),
        output_error=of_output,
    )


def draw_report(layers: Sequence[LayerReport], path: Path) -> None:
    """Draw the errors as a heat map with a column per decoder block and a row per linear of a block.

    Args:
        layers: reports in the model's order; linears outside decoder blocks are left out.
        path: PNG file to write; it is not written if there is no linear to draw.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    inside = [layer for layer in layers if ".layers." in layer.name]
    if not inside:
        return
    places = [layer.name.split(".layers.")[1].split(".", 1) for layer in inside]
    blocks = sorted({int(block) for block, _ in places})
    linears = list(dict.fromkeys(linear for _, linear in places))
    panels = {"relative weight error": [layer.weight_error for layer in inside]}
    if any(layer.output_error is not None for layer in inside):
        panels["relative output error"] = [layer.output_error or 0.0 for layer in inside]
    figure = Figure(figsize=(3 + 0.25 * len(blocks), 0.6 + 2.4 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, errors) in zip(figure.subplots(len(panels), 1, squeeze=False)[:, 0], panels.items(), strict=True):
        grid = torch.full((len(linears), len(blocks)), torch.nan)
        for (block, linear), error in zip(places, errors, strict=True):
            grid[linears.index(linear), blocks.index(int(block))] = error
        figure.colorbar(axes.imshow(grid.numpy(), aspect="auto", cmap="viridis"), ax=axes)
        axes.set_title(title)
        axes.set_yticks(range(len(linears)), linears)
        axes.set_xticks(range(0, len(blocks), 4), blocks[::4])
        axes.set_xlabel("decoder block")
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=120, format=path.suffix[1:])


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
