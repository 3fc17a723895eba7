"""The offline quantiser: a dense checkpoint to a packed one, a decoder block at a time.

Every linear but the ignored ones is packed; embeddings, norms and biases are copied. Query, key and value share one
tensor scale, and so do gate and up, because engines fuse them into one matrix that has a single scale.

Each decoder block becomes one file of the output, so a run that was killed continues with the first missing block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from tqdm import tqdm

from qerl_pl.quant.files import CONFIG, Checkpoint, read_json
from qerl_pl.quant.formats import Format, PackedWeight, quantize
from qerl_pl.quant.layouts import read_layout
from qerl_pl.quant.loading import meta_model
from qerl_pl.quant.output import OutputFolder
from qerl_pl.quant.plan import fused_groups, output_files, split_linears
from qerl_pl.quant.report import LayerReport, report_layer
from qerl_pl.quant.writers import WRITERS, Writer

FormatName = Literal["nvfp4", "mxfp4", "nf4"]
VERSION = 1  # of the layout and arithmetic of the output; part of its metadata


def quantize_checkpoint(
    model: Path,
    output: Path,
    *,
    format: FormatName = "nvfp4",
    ignore: Sequence[str] = ("lm_head",),
    device: torch.device | str = "cpu",
) -> list[LayerReport]:
    """Write a copy of a checkpoint whose linears are packed, rounded to nearest under min-max scales.

    The output loads with ``load_base``, and with the stock libraries that ``writers`` names. The needed memory is that
    of one decoder block, or of the embeddings if they are larger.

    Args:
        model: folder of a bf16, fp16 or fp32 checkpoint.
        output: folder to make; must not exist, or be empty.
        format: of the packed weights.
        ignore: linears left alone: names, or regular expressions after "re:", matched from the start of the name.
        device: where blocks are quantised.

    Raises:
        ValueError: the model cannot be read or is quantised already, the output is not empty or holds an unfinished run
            with other settings, an entry of ``ignore`` matches nothing or splits what engines fuse, a weight does not
            fit the format, or nothing is left to pack.
    """
    checkpoint = Checkpoint(model)
    if read_layout(checkpoint.path) is not None:
        raise ValueError(f"{model} is quantised already; expected a bf16, fp16 or fp32 checkpoint")
    writer, skeleton = WRITERS[format], meta_model(checkpoint.path)
    linears, dense = split_linears(skeleton, ignore, block=writer.fmt.block)
    groups, files = fused_groups(linears), output_files(checkpoint)
    settings = {
        "format": format,
        "method": "rtn",
        "version": VERSION,
        "base": str(model.resolve()),
        "ignore": list(ignore),
    }
    folder = OutputFolder(output, settings)
    num_weights = {file: sum(map(checkpoint.num_weights, names)) for file, names in files.items()}
    with tqdm(total=sum(num_weights.values()), unit=" weights", unit_scale=True, desc="quantize") as progress:
        for file, names in files.items():
            if file not in folder.done:
                tensors, reports = _quantize_file(checkpoint, names, groups, writer, skeleton.dtype, device)
                folder.add(file, tensors, [asdict(report) for report in reports])
            progress.update(num_weights[file])
    config = {**read_json(checkpoint.path / CONFIG), "quantization_config": writer.config(dense, skeleton.dtype)}
    layers = folder.finish(checkpoint.path, config)
    return [LayerReport(**layer) for layer in layers]


def quantize_group(weights: Mapping[str, Tensor], fmt: Format) -> dict[str, PackedWeight]:
    """Round the weights of fused linears (name to [N, K]) to nearest, under one tensor scale."""
    shared = fmt.tensor_scale(torch.stack([weight.abs().amax().float() for weight in weights.values()]).amax())
    return {name: quantize(weight, fmt, shared, name=f"{name}.weight") for name, weight in weights.items()}


def _quantize_file(
    checkpoint: Checkpoint,
    names: Sequence[str],
    groups: Mapping[str, Sequence[str]],
    writer: Writer,
    dtype: torch.dtype,
    device: torch.device | str,
) -> tuple[dict[str, Tensor], list[LayerReport]]:
    packed_names = {f"{member}.weight" for group in groups.values() for member in group}
    tensors = {name: checkpoint.read(name) for name in names if name not in packed_names}
    reports = []
    for first, group in groups.items():
        if f"{first}.weight" not in names:
            continue
        weights = {name: checkpoint.read(f"{name}.weight").to(device) for name in group}
        for name, packed in quantize_group(weights, writer.fmt).items():
            reports.append(report_layer(name, weights[name], packed, writer.fmt))
            tensors |= {name + suffix: tensor.cpu() for suffix, tensor in writer.tensors(packed, dtype).items()}
    return tensors, reports
