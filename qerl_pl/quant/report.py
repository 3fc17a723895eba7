"""How well each linear survived quantisation, in numbers and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from qerl_pl.quant.formats import Format, PackedWeight
from qerl_pl.quant.rounding import output_error

PICTURE = "quantization_report.png"


@dataclass(frozen=True)
class LayerReport:
    """One linear. An error is a root mean square, relative to that of what it is an error of."""

    name: str
    shape: tuple[int, int]
    weight_error: float
    """Of the weights."""
    max_error: float
    """Largest error of a weight over the largest weight."""
    outlier_ratio: float
    """Largest weight over the root mean square: how far the tensor scale has to reach."""
    output_error: float | None = None
    """Of the outputs on the calibration data, as the packed blocks before this one give them; None: not measured."""


def report_layer(
    name: str, weight: Tensor, packed: PackedWeight, fmt: Format, second_moment: Tensor | None = None
) -> LayerReport:
    """Compare a weight [N, K] with its packed form.

    Args:
        name: of the linear.
        weight: [N, K] floating.
        packed: the same weight.
        fmt: of the packed weight.
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
    """Errors as a heat map, a column for each decoder block and a row for each of its linears.

    Args:
        layers: in the model's order; those outside decoder blocks are left out.
        path: PNG file to write; nothing is written if no layer is left.
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
    figure.savefig(path, dpi=120)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
