"""Convert a published NVFP4 checkpoint to 4-bit weights with 16-bit activations (W4A16), which trainer and engines
load. Of a vision-language checkpoint, also an unquantised one, only the language model is copied."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import dequantize as dequantize_fp8
from torch import Tensor

from qerl_pl.common.phases import counted
from qerl_pl.model.files import Checkpoint, model_config
from qerl_pl.quant.families import check_family
from qerl_pl.quant.formats import PackedWeight
from qerl_pl.quant.layouts import WRITERS
from qerl_pl.quant.loading import check_complete, meta_model
from qerl_pl.quant.nvfp4 import E4M3_MAX, dequantize
from qerl_pl.quant.output import OutputFolder
from qerl_pl.quant.published import COMPRESSED, Stored, conversion_reasons, fused_packed, read_stored
from qerl_pl.quant.selection import linears_of, output_files

VERSION = 1  # version of this conversion, part of the key under which its result is cached
NAN_BITS = 0x7F  # bits of NaN in E4M3, without the sign
ROUNDING = 2.0**-23
"""Relative difference up to which two scales count as equal: twice the largest rounding error of an fp32 reciprocal."""


def convert_checkpoint(path: Path, output: Path) -> list[str]:
    """Convert the checkpoint in the folder ``path``, and write the result to ``output``. From a published NVFP4
    checkpoint this makes one in the format of compressed-tensors with 4-bit weights and 16-bit activations (W4A16); of
    a 16-bit checkpoint with a vision model it copies the language model. Returns sentences that say why the conversion
    was needed.

    Dequantised weights equal, bit for bit, those that the library compressed-tensors computes from the original. Like
    that library, this function replaces tensor scales of ModelOpt by their fp32 reciprocals, so weights differ from
    ModelOpt's own by a relative error of at most 2^-23 before they are rounded to 16 bits. Raises ValueError if the
    checkpoint is damaged, or tensor scales of linear layers that inference engines fuse into one matrix cannot be made
    equal without changing weights.
    """
    check_family(path)
    reasons, checkpoint, skeleton = conversion_reasons(path), Checkpoint(path), meta_model(path)
    stored = read_stored(checkpoint)
    groups = fused_packed(path, stored)
    check_complete(checkpoint, skeleton, packed=stored.packed)
    packed = {name for group in groups for name in group}
    dropped = {*stored.activations, *stored.cache}
    settings = {"format": "nvfp4", "method": "published", "version": VERSION, "base": str(path.resolve())}
    files = output_files(checkpoint)
    with OutputFolder(output, {**settings, "changes": reasons}) as folder:
        for file in counted(files, "convert to W4A16", total=len(files), unit="files"):
            if file.name in folder.done:
                continue
            tensors = {name: checkpoint.read(name) for name in file.tensors if name not in dropped}
            modules = {name.rpartition(".")[0] for name in tensors}
            written = _dense(tensors, stored, modules - packed, skeleton.dtype)
            for group in groups:
                if group[0] in modules:
                    weights = {name: _weight(tensors, stored, name) for name in group}
                    written |= _packed(path, weights, skeleton.dtype)
            quantised = {f"{name}.{leaf}" for name in modules for leaf in stored.leaves(name)}
            rest = {name: tensor for name, tensor in tensors.items() if name not in quantised}
            folder.add(file.name, rest | written)
        config = {name: value for name, value in model_config(path).items() if name != "quantization_config"}
        if packed:
            dense = [name for name in linears_of(skeleton) if name not in packed]
            config["quantization_config"] = WRITERS["nvfp4"].config(dense, skeleton.dtype)
        folder.finish(path, config)
    return reasons


def _dense(
    tensors: Mapping[str, Tensor], stored: Stored, modules: Iterable[str], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return the dequantised weights, by tensor name, of those ``modules`` that are stored in NVFP4 or FP8."""
    written = {}
    for name in modules:
        if name in stored.packed:
            written[f"{name}.weight"] = dequantize(_weight(tensors, stored, name), dtype)
        elif name in stored.fp8:
            written[f"{name}.weight"] = dense_of_fp8(tensors, name).to(dtype)
    return written


def _packed(path: Path, weights: Mapping[str, PackedWeight], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of the converted checkpoint, by name, for NVFP4 linear layers that inference engines fuse into
    one matrix (such as q, k and v) and that therefore need one tensor scale. Raises ValueError if no tensor scale
    leaves all dequantised weights unchanged."""
    shared = share_scale(list(weights.values()))
    if shared is None:
        numbers = ", ".join(f"{weight.global_scale.item():.6g}" for weight in weights.values())
        raise ValueError(
            f"{path}: the tensor scales of {', '.join(weights)} are {numbers}; engines fuse these linears into "
            "a matrix with one tensor scale, and no block scales in E4M3 keep all weights the same under one tensor "
            "scale: quantise the bf16 model by `qerl quantize`"
        )
    written = ((name, WRITERS["nvfp4"].tensors(weight, dtype)) for name, weight in zip(weights, shared, strict=True))
    return {name + suffix: tensor for name, tensors in written for suffix, tensor in tensors.items()}


def _weight(tensors: Mapping[str, Tensor], stored: Stored, name: str) -> PackedWeight:
    if stored.packed[name] == COMPRESSED:
        divisor = tensors[f"{name}.weight_global_scale"].float().reshape(())
        codes, multiplier = tensors[f"{name}.weight_packed"], 1 / divisor.double()
    else:
        codes = tensors[f"{name}.weight"]
        multiplier = tensors[f"{name}.weight_scale_2"].double().reshape(())
    if not (multiplier.float().isfinite() and multiplier.float() > 0):
        raise ValueError(f"{name} has tensor scale {float(multiplier)}; expected a finite number above 0 in fp32")
    block_scale = tensors[f"{name}.weight_scale"].view(torch.uint8)
    if (block_scale & NAN_BITS == NAN_BITS).any():
        raise ValueError(f"{name}.weight_scale holds NaN")
    return PackedWeight(codes, block_scale, multiplier)


def share_scale(weights: Sequence[PackedWeight]) -> list[PackedWeight] | None:
    """Give NVFP4 weights one common tensor scale, one of those that they have, without changing dequantised weights:
    each block scale is multiplied by the ratio of the weight's old tensor scale to the new one. Returns the new
    weights, in order; None if, with every choice, E4M3 cannot represent one of these products exactly, which is rare if
    the ratios are powers of two."""
    scales = sorted({weight.global_scale.item() for weight in weights}, reverse=True)
    if len(scales) == 1:
        return list(weights)
    for scale in torch.tensor(scales, dtype=torch.float64):
        blocks = [(weight.codes, _absorbed(weight, scale)) for weight in weights]
        shared = [PackedWeight(codes, bits, scale) for codes, bits in blocks if bits is not None]
        if len(shared) == len(weights):
            return shared
    return None


def _absorbed(weight: PackedWeight, scale: Tensor) -> Tensor | None:
    """Return the block scales (uint8, the bits of E4M3 numbers) with which an NVFP4 weight keeps its dequantised values
    if its tensor scale is replaced by ``scale``; None if E4M3 cannot represent one of these block scales."""
    used = weight.block_scale.unique()
    wanted = used.view(torch.float8_e4m3fn).double() * (weight.global_scale / scale)
    bits = wanted.clamp(-E4M3_MAX, E4M3_MAX).float().to(torch.float8_e4m3fn)
    if ((bits.double() - wanted).abs() > ROUNDING * wanted.abs()).any():
        return None
    table = torch.zeros(256, dtype=torch.uint8)
    table[used.long()] = bits.view(torch.uint8)
    return table[weight.block_scale.int()]


def dense_of_fp8(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """Dequantise an FP8 weight with scales per tensor, row or block; returns [N, K] in the dtype of the scales."""
    weight, scale = tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"]
    rows, columns = weight.shape
    if scale.numel() == 1:
        scale = scale.reshape(1)
    elif scale.numel() == rows:
        scale = scale.reshape(rows, 1)
    else:
        scale = scale.squeeze()  # ModelOpt stores [N/128, 1, K/128, 1]
    args = None
    if scale.ndim == 2 and scale.shape[1] > 1:
        block = next((size for size in (128, 64, 32, 16) if scale.shape == (-(-rows // size), -(-columns // size))), 0)
        if not block:
            raise ValueError(
                f"{name} is in FP8, {[rows, columns]}, with scales {list(scale.shape)}; expected a scale per tensor, "
                "row, or square block of 128, 64, 32 or 16"
            )
        args = QuantizationArgs(strategy="block", block_structure=[block, block])  # pyright: ignore[reportArgumentType]
    if not (scale.isfinite() & (scale >= 0)).all():
        raise ValueError(f"{name}.weight_scale holds negative numbers, NaN or infinity; expected finite magnitudes")
    return dequantize_fp8(weight, scale, args=args, dtype=scale.dtype)
