"""Offline quantiser: write a copy of a dense checkpoint with 4-bit weights, one decoder block at a time.

All linear layers are quantised, except those that ``ignore`` or the family leaves dense. Linears that engines fuse into
one matrix share a tensor scale. Each block becomes one file, so a run that was killed continues with the first missing
block. With calibration data, weights are rounded, and errors measured, on inputs that the previous blocks compute with
quantised weights (and with the adapter for their errors, if one is written).

Letters: N outputs, K inputs of a linear layer.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qerl_pl.common.phases import phase
from qerl_pl.common.seeding import derive_seed
from qerl_pl.model.family import FAMILIES, PROJECTIONS, Family
from qerl_pl.model.files import Checkpoint
from qerl_pl.model.quantization import FormatName, Method
from qerl_pl.model.tokenizer import load_tokenizer
from qerl_pl.quant.blockwise import BlockStream
from qerl_pl.quant.calibration import Calibration
from qerl_pl.quant.declared import quantization_config
from qerl_pl.quant.experts import OF_EXPERT
from qerl_pl.quant.families import check_family
from qerl_pl.quant.layouts import WRITERS, Writer, packed_weight
from qerl_pl.quant.loading import check_complete, meta_model
from qerl_pl.quant.output import OutputFolder
from qerl_pl.quant.residual import StartFolder, adapter_tensors, fresh_factors, residual_factors, with_adapter
from qerl_pl.quant.rounding import LayerReport, pack_group, pack_groups, report_layer
from qerl_pl.quant.selection import OutputFile, fused_groups, output_files, split_linears

LARGEST_WEIGHT = 1e6  # the sum of squares of a layer of larger weights could overflow fp32
TOGETHER = 2**27  # weights that are packed at once, whose temporary copies take about 2 GB
VERSION = 2  # version of the written tensors' layout and arithmetic, stored with them


def quantize_checkpoint(
    model: Path,
    output: Path,
    *,
    format: FormatName = "nvfp4",
    method: Method = "rtn",
    ignore: Sequence[str] = ("lm_head",),
    calibration: Calibration | None = None,
    residual: int | None = None,
    device: torch.device | str = "cpu",
) -> list[LayerReport]:
    """Write a copy of the dense checkpoint in the folder ``model`` with 4-bit linear layers; returns an error report
    for each.

    ``load_base`` can load the copy, and so can transformers and, except for NF4, vLLM. The device holds one decoder
    block and, with calibration data, this block in fp32 and the second moments of its layers' inputs. Host memory holds
    one block, or the embeddings if they are larger, and the hidden states of the calibration data.

    Args:
        output: folder to create, new or empty; files that an interrupted call with equal settings finished are kept.
        method: rounding method, "rtn" or "gptq", see ``pack_group``.
        ignore: linear layers to leave dense: names, or "re:" and a regular expression that matches the start of names.
        calibration: calibration data, required by gptq. With it, output errors are reported for all methods.
        residual: rank of a LoRA adapter against the quantisation errors (``residual_factors``), written to ``start``
            inside the output, for ``model.lora.start``; needs calibration data. None: no adapter.

    Raises:
        ValueError: the model cannot be read or is quantised already, the output is not empty or holds an unfinished run
            with other settings, or linear layers cannot be quantised with these settings.
    """
    checkpoint = Checkpoint(model)
    config = check_family(checkpoint.path)
    if quantization_config(checkpoint.path) is not None:
        raise ValueError(f"{model} is quantised already; expected a bf16, fp16 or fp32 checkpoint")
    load_tokenizer(checkpoint.path, config)
    writer, skeleton = WRITERS[format], meta_model(checkpoint.path)
    check_complete(checkpoint, skeleton)
    shapes, dense = split_linears(skeleton, ignore, block=writer.fmt.block)
    groups, files = fused_groups(list(shapes), {*shapes, *dense}), output_files(checkpoint)
    _check_calibrated(method, residual, calibration, outside=files[0].groups(groups), config=config)
    settings = {
        "format": format,
        "method": method,
        "version": VERSION,
        "base": str(model.resolve()),
        "ignore": list(ignore),
        "calibration": calibration and {"source": calibration.source, "shape": list(calibration.tokens.shape)},
        **({} if residual is None else {"residual": residual}),
    }
    folder = OutputFolder(output, settings)
    start = StartFolder(folder.partial, rank=residual)
    stream = None if calibration is None else BlockStream(skeleton, checkpoint, calibration.tokens, device)
    sizes = [sum(map(checkpoint.num_weights, file.tensors)) for file in files]
    with folder, phase(f"quantize ({format}, {method})", total=sum(sizes), unit="weights") as progress:
        for file, size in zip(files, sizes, strict=True):
            if file.name not in folder.done:
                tensors = {name: checkpoint.read(name) for name in file.tensors}
                check_weights(tensors)
                packed = pack_file(file, tensors, groups, writer, method, skeleton, stream, device, residual)
                start.add(file.name, packed[2])  # before the file that marks the block as finished
                folder.add(file.name, *packed[:2])
            if stream is not None and file.block is not None and any(later.name not in folder.done for later in files):
                weights = dense_tensors(folder.read(file.name, device), shapes, writer)
                stream.advance(file.block, with_adapter(weights, start.read(file.name, device)))
            progress.update(size)
        layers = [LayerReport(**layer) for layer in folder.reports()]
        start.finish(base=output)
        folder.finish(checkpoint.path, {**config, "quantization_config": writer.config(dense, skeleton.dtype)})
    return layers


def pack_file(
    file: OutputFile,
    tensors: Mapping[str, Tensor],
    groups: Mapping[str, list[str]],
    writer: Writer,
    method: Method,
    skeleton: PreTrainedModel,
    stream: BlockStream | None,
    device: torch.device | str,
    rank: int | None,
) -> tuple[dict[str, Tensor], list[dict], dict[str, Tensor]]:
    """Compute the contents of one file of the quantised checkpoint from the dense checkpoint's ``tensors``, which are
    those of one decoder block, or all weights outside of blocks. Returns the tensors to write, the error reports of the
    quantised linear layers, and the tensors of the LoRA adapter that approximates their quantisation errors, all on the
    CPU.

    ``groups`` are the linear layers of the whole model that are to be quantised; those of a group share one tensor
    scale. ``stream`` has the hidden states of the calibration data at the input of the file's decoder block; None
    without such data. ``rank``, which needs ``stream``, is the rank of the adapter; with it, layers that stay dense get
    an adapter whose product is 0.
    """
    fmt, moments, adapter = writer.fmt, {}, {}
    in_file = file.groups(groups)
    exact = torch.float32 if rank is None else torch.float64
    written, adapted = dict(tensors), {}
    if file.block is not None:
        written = {name: tensor.to(device) for name, tensor in tensors.items()}
        if stream is not None:
            moments = stream.second_moments(file.block, written, [group[0] for group in in_file], dtype=exact)
            adapted = {} if rank is None else adapted_linears(file.block, stream, FAMILIES[skeleton.config.model_type])
    layers = []
    for batch in batches(in_file, tensors, together=method == "rtn"):
        read = [{name: written.pop(f"{name}.weight").to(device) for name in group} for group in batch]
        weights = {name: weight for group in read for name, weight in group.items()}
        first = moments.get(batch[0][0])
        done = pack_groups(read, fmt) if len(batch) > 1 else pack_group(weights, fmt, method, first)
        moment_of = {name: moments.get(group[0]) for group in batch for name in group}
        for name, packed in done.items():
            moment = moment_of[name]
            layers.append(asdict(report_layer(name, weights[name], packed, fmt, moment)))
            if rank is not None and name in adapted:
                assert moment is not None
                error = weights[name].double() - fmt.dequantize(packed, torch.float32)
                factors = residual_factors(error, moment, rank, generator=_generator(name))
                adapter |= adapter_tensors(name, *(factor.cpu() for factor in factors))
            written |= {name + suffix: tensor for suffix, tensor in writer.tensors(packed, skeleton.dtype).items()}
    for name, shape in adapted.items():
        if rank is not None and f"{name}.weight" in written:
            adapter |= adapter_tensors(name, *fresh_factors(shape, rank, generator=_generator(name)))
    order = {name: place for place, name in enumerate(name for group in in_file for name in group)}
    layers.sort(key=lambda layer: order[layer["name"]])
    return {name: tensor.cpu() for name, tensor in written.items()}, layers, adapter


def batches(
    groups: Sequence[Sequence[str]], tensors: Mapping[str, Tensor], *, together: bool
) -> Iterator[list[Sequence[str]]]:
    """Divide groups of linear layers (those of a group share a tensor scale) into lists that the quantiser rounds in
    one call each. With ``together``, groups of experts' layers with equally many input features share a list until its
    matrices have ``TOGETHER`` elements, so that a GPU launches fewer kernels; every other group has its own list."""
    waiting: dict[int, list[Sequence[str]]] = {}
    for group in groups:
        if not (together and OF_EXPERT.fullmatch(group[0])):
            yield [group]
            continue
        columns = tensors[f"{group[0]}.weight"].shape[1]
        batch = waiting.setdefault(columns, [])
        batch.append(group)
        if columns * sum(len(tensors[f"{name}.weight"]) for group in batch for name in group) >= TOGETHER:
            yield waiting.pop(columns)
    yield from waiting.values()


def adapted_linears(block: str, stream: BlockStream, family: Family) -> dict[str, tuple[int, int]]:
    """Return the linear layers of a decoder block that LoRA adapts by default: their shapes [N, K] by name."""
    targets = family.targets(PROJECTIONS)
    return {
        f"{block}.{name}": (module.out_features, module.in_features)
        for name, module in stream.blocks[block][1].named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in targets
    }


def _generator(linear: str) -> torch.Generator:
    return torch.Generator().manual_seed(derive_seed(0, linear))


def dense_tensors(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, int]], writer: Writer
) -> dict[str, Tensor]:
    """Dequantise the 4-bit weights among a file's tensors to fp32, and return them together with all other tensors,
    which are not changed."""
    layout = writer.layout
    packed = [name for name in shapes if name + layout.marker in tensors]
    stored = {name + suffix for name in packed for suffix in (*layout.parts, *layout.redundant)}
    dense = {name: tensor for name, tensor in tensors.items() if name not in stored}
    for name in packed:
        weight = packed_weight(tensors, name, layout, shapes[name])
        dense[f"{name}.weight"] = writer.fmt.dequantize(weight, torch.float32)
    return dense


def check_weights(tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError for weights that are not finite, or of a magnitude above ``LARGEST_WEIGHT``."""
    for name, tensor in tensors.items():
        if not (tensor.is_floating_point() and tensor.numel()):
            continue
        least, most = (value.item() for value in tensor.aminmax())  # NaN if any value is
        if not (math.isfinite(least) and math.isfinite(most)):
            raise ValueError(f"{name} holds NaN or infinity; expected finite weights")
        if (largest := max(-least, most)) > LARGEST_WEIGHT:
            raise ValueError(f"{name} holds {largest:.3g}; expected weights of at most {LARGEST_WEIGHT:g}")


def _check_calibrated(
    method: Method,
    residual: int | None,
    calibration: Calibration | None,
    *,
    outside: Sequence[Sequence[str]],
    config: Mapping[str, Any],
) -> None:
    if residual is not None and not 1 <= residual <= config["hidden_size"]:
        raise ValueError(
            f"the rank of the residual is {residual}; expected at least 1 and at most the model's hidden_size "
            f"({config['hidden_size']}), the largest rank of an adapter with which a run can start"
        )
    length, positions = 0 if calibration is None else calibration.tokens.shape[1], config.get("max_position_embeddings")
    if positions is not None and length > positions:
        raise ValueError(
            f"calibration sequences have {length} tokens and the model has {positions} positions; lower --length"
        )
    if calibration is None and (method == "gptq" or residual is not None):
        what = f"method {method}" if method == "gptq" else f"a residual of rank {residual}"
        raise ValueError(f"{what} needs calibration data: give --calibration")
    if outside and method == "gptq":
        names = [name for group in outside for name in group]
        raise ValueError(f"method {method} quantises decoder blocks only; add {names} to ignore")
