"""The offline quantiser: a dense checkpoint to a packed one, a decoder block at a time.

Every linear but the ignored ones is packed; embeddings, norms and biases are copied. Query, key and value share one
tensor scale, and so do gate and up, because engines fuse them into one matrix that has a single scale.

Each decoder block becomes one file of the output, so a run that was killed continues with the first missing block.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from qerl_pl.quant.files import CONFIG, Checkpoint, read_json
from qerl_pl.quant.layouts import compressed_tensors_config, compressed_tensors_state, quantization_layout
from qerl_pl.quant.loading import meta_model, tied_weights
from qerl_pl.quant.nvfp4 import BLOCK, NVFP4Weight, dequantize, quantize_nvfp4, tensor_scale
from qerl_pl.quant.output import OutputFolder

VERSION = 1  # of the layout and arithmetic of the output; part of its metadata
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_BLOCK_OF = re.compile(r"^(.*\.layers\.\d+)\.")


@dataclass(frozen=True)
class LayerReport:
    """How well one linear survived."""

    name: str
    shape: tuple[int, int]
    weight_error: float
    """Frobenius norm of the error over that of the weight."""
    max_error: float
    """Largest error of a weight over the largest weight."""
    outlier_ratio: float
    """Largest weight over the root mean square: how far the tensor scale has to reach."""


def quantize_checkpoint(
    model: Path, output: Path, *, ignore: Sequence[str] = ("lm_head",), device: torch.device | str = "cpu"
) -> list[LayerReport]:
    """Write a copy of a checkpoint whose linears are NVFP4, rounded to nearest under min-max scales.

    The output loads with ``load_base``, and with stock vLLM and transformers (compressed-tensors
    ``nvfp4-pack-quantized``). The needed memory is that of one decoder block, or of the embeddings if they are larger.

    Args:
        model: folder of a bf16, fp16 or fp32 checkpoint.
        output: folder to make; must not exist, or be empty.
        ignore: linears left alone: names, or regular expressions after "re:", matched from the start of the name.
        device: where blocks are quantised.

    Raises:
        ValueError: the model cannot be read or is quantised already, the output is not empty or holds an unfinished run
            with other settings, an entry of ``ignore`` matches nothing or splits what engines fuse, a weight does not
            fit the format, or nothing is left to pack.
    """
    checkpoint = Checkpoint(model)
    if quantization_layout(checkpoint.path) != "unquantised":
        raise ValueError(f"{model} is quantised already; expected a bf16, fp16 or fp32 checkpoint")
    files = output_files(checkpoint)
    groups = fused_groups(packable_linears(checkpoint, ignore))
    settings = {
        "format": "nvfp4",
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
                tensors, reports = _quantize_file(checkpoint, names, groups, device)
                folder.add(file, tensors, [asdict(report) for report in reports])
            progress.update(num_weights[file])
    config = {**read_json(checkpoint.path / CONFIG), "quantization_config": compressed_tensors_config(ignore)}
    layers = folder.finish(checkpoint.path, config)
    return [LayerReport(**layer) for layer in layers]


def packable_linears(checkpoint: Checkpoint, ignore: Sequence[str]) -> list[str]:
    """Names of the linears that the format takes, in the model's order.

    Raises:
        ValueError: an entry of ``ignore`` matches no linear, or a linear that is left is tied or does not divide into
            blocks.
    """
    model = meta_model(checkpoint.path)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    for entry in ignore:
        if not any(is_ignored(name, [entry]) for name in linears):
            raise ValueError(f"ignore entry {entry!r} matches no linear of {checkpoint.path}, e.g. {_example(linears)}")
    kept = {name: module for name, module in linears.items() if not is_ignored(name, ignore)}
    for name, module in kept.items():
        if f"{name}.weight" in tied_weights(model):
            raise ValueError(f"{name} shares its weight with the embeddings, which stay dense; add it to ignore")
        if module.in_features % BLOCK:
            raise ValueError(f"{name} has {module.in_features} inputs, not a multiple of {BLOCK}; add it to ignore")
    if not kept:
        raise ValueError(f"ignore {list(ignore)} leaves no linear of {checkpoint.path} to pack")
    return list(kept)


def is_ignored(name: str, ignore: Sequence[str]) -> bool:
    """Whether an entry names a linear, or matches it as "re:PATTERN" from the start."""
    return any(re.match(entry[3:], name) if entry.startswith("re:") else entry == name for entry in ignore)


def fused_groups(linears: Sequence[str]) -> dict[str, list[str]]:
    """First linear of a group to the whole group: what engines fuse shares one tensor scale; the others are alone.

    Raises:
        ValueError: only a part of what engines fuse is to be packed.
    """
    siblings = {member: group for group in FUSED for member in group}
    groups: dict[str, list[str]] = {}
    for name in linears:
        parent, dot, leaf = name.rpartition(".")
        group = [f"{parent}{dot}{member}" for member in siblings.get(leaf, (leaf,))]
        if missing := set(group) - set(linears):
            raise ValueError(f"engines fuse {group}; ignore all of them or none, not only {sorted(missing)}")
        if name == group[0]:
            groups[name] = group
    return groups


def output_files(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """File name to the source tensors that go into it: one file a decoder block, the first for everything else."""
    parts: dict[str, list[str]] = {"": []}
    for name in checkpoint.names():
        block = _BLOCK_OF.match(name)
        parts.setdefault(block[1] if block else "", []).append(name)
    ordered = sorted(parts, key=lambda block: (len(block), block))  # .9 before .10
    return {f"model-{i:05}-of-{len(parts):05}.safetensors": parts[block] for i, block in enumerate(ordered, start=1)}


def quantize_group(weights: Mapping[str, Tensor]) -> dict[str, NVFP4Weight]:
    """Round the weights of fused linears (name to [N, K]) to nearest, under one tensor scale."""
    shared = tensor_scale(torch.stack([weight.abs().amax().float() for weight in weights.values()]).amax())
    return {name: quantize_nvfp4(weight, shared, name=f"{name}.weight") for name, weight in weights.items()}


def report_layer(name: str, weight: Tensor, packed: NVFP4Weight) -> LayerReport:
    """Compare a weight [N, K] with its packed form."""
    weight = weight.float()
    error = dequantize(packed, torch.float32).sub_(weight)
    norm, largest = weight.norm().item(), weight.abs().max().item()
    rms = norm / weight.numel() ** 0.5
    return LayerReport(
        name=name,
        shape=(weight.shape[0], weight.shape[1]),
        weight_error=error.norm().item() / norm if norm else 0.0,
        max_error=error.abs().max().item() / largest if largest else 0.0,
        outlier_ratio=largest / rms if rms else 0.0,
    )


def _quantize_file(
    checkpoint: Checkpoint, names: Sequence[str], groups: Mapping[str, Sequence[str]], device: torch.device | str
) -> tuple[dict[str, Tensor], list[LayerReport]]:
    packed_names = {f"{member}.weight" for group in groups.values() for member in group}
    tensors = {name: checkpoint.read(name) for name in names if name not in packed_names}
    reports = []
    for first, group in groups.items():
        if f"{first}.weight" not in names:
            continue
        weights = {name: checkpoint.read(f"{name}.weight").to(device) for name in group}
        for name, packed in quantize_group(weights).items():
            reports.append(report_layer(name, weights[name], packed))
            tensors |= {key: tensor.cpu() for key, tensor in compressed_tensors_state(name, packed).items()}
    return tensors, reports


def _example(names: Mapping[str, nn.Module]) -> str:
    return next(iter(names), "nothing: it has no linears")
