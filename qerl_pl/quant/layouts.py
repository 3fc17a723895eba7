"""Layouts of packed weights in supported checkpoints: which tensors a packed linear has, and how they are converted to
the buffers of ``FrozenLinear``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from qerl_pl.model.files import CONFIG, MODELOPT_CONFIG, Checkpoint, read_json
from qerl_pl.quant.formats import Format, PackedWeight
from qerl_pl.quant.linear import FrozenLinear
from qerl_pl.quant.mxfp4 import MXFP4
from qerl_pl.quant.nf4 import NF4
from qerl_pl.quant.nvfp4 import NVFP4

_KNOWN = (
    "unquantised; compressed-tensors nvfp4-pack-quantized and mxfp4-pack-quantized with 16-bit activations; "
    "ModelOpt W4A16_NVFP4; bitsandbytes nf4 without double quantisation"
)


@dataclass(frozen=True)
class Part:
    """One of the tensors in which a checkpoint stores a packed weight: the buffer of ``FrozenLinear`` that it fills,
    and how it is converted."""

    buffer: str
    convert: Callable[[Tensor, Sequence[int]], Tensor]
    """Converts the stored tensor, given the shape of the buffer. It need not check sizes: the caller checks the
    result's shape."""


@dataclass(frozen=True)
class Layout:
    """Way of storing packed weights in a checkpoint."""

    fmt: Format
    parts: Mapping[str, Part]
    """Stored tensors of a packed linear, by the suffix that follows the linear's name in the tensor's name."""
    marker: str
    """Suffix of a tensor that exists only for packed linears."""
    redundant: tuple[str, ...] = ()
    """Suffixes of tensors that are not needed."""
    table: str | None = None
    """Suffix of a tensor that has the values of the codes, which have to be the format's."""


def _as_is(tensor: Tensor, _shape: Sequence[int]) -> Tensor:
    return tensor


def _bits(tensor: Tensor, _shape: Sequence[int]) -> Tensor:
    return tensor.view(torch.uint8)


def _multiplier(tensor: Tensor, _shape: Sequence[int]) -> Tensor:
    return tensor.double().squeeze().view(torch.int64)


def _divisor(tensor: Tensor, _shape: Sequence[int]) -> Tensor:
    return (1 / tensor.double()).squeeze().view(torch.int64)


def _swapped_nibbles(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    return _reshaped((tensor >> 4) | (tensor << 4), shape)


def _fp32_bits(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    return _reshaped(tensor.float().view(torch.int32), shape)


def _reshaped(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    return tensor.reshape(shape) if tensor.numel() == math.prod(shape) else tensor


COMPRESSED_NVFP4 = Layout(
    fmt=NVFP4,
    parts={
        ".weight_packed": Part("codes", _as_is),
        ".weight_scale": Part("block_scale", _bits),
        ".weight_global_scale": Part("global_scale_bits", _divisor),
    },
    marker=".weight_packed",
)
COMPRESSED_MXFP4 = Layout(
    fmt=MXFP4,
    parts={".weight_packed": Part("codes", _as_is), ".weight_scale": Part("block_scale", _as_is)},
    marker=".weight_packed",
)
MODELOPT_NVFP4 = Layout(
    fmt=NVFP4,
    parts={
        ".weight": Part("codes", _as_is),
        ".weight_scale": Part("block_scale", _bits),
        ".weight_scale_2": Part("global_scale_bits", _multiplier),
    },
    marker=".weight_scale_2",
)
BITSANDBYTES_NF4 = Layout(
    fmt=NF4,
    parts={".weight": Part("codes", _swapped_nibbles), ".weight.absmax": Part("block_scale", _fp32_bits)},
    marker=".weight.absmax",
    redundant=(".weight.quant_map", ".weight.quant_state.bitsandbytes__nf4"),
    table=".weight.quant_map",
)


_VARIANT_KEYS = {"compressed-tensors": "format", "bitsandbytes": "bnb_4bit_quant_type"}


def packed_weight(tensors: Mapping[str, Tensor], name: str, layout: Layout, shape: tuple[int, int]) -> PackedWeight:
    """Build the packed weight [N, K] of linear ``name`` from the tensors in which a checkpoint stores it."""
    num_rows, num_columns = shape
    layer = FrozenLinear(num_columns, num_rows, layout.fmt, device="meta")
    layer.global_scale_bits = torch.ones((), dtype=torch.float64).view(torch.int64)
    for suffix, part in layout.parts.items():
        setattr(layer, part.buffer, part.convert(tensors[name + suffix], getattr(layer, part.buffer).shape))
    return layer.packed


def check_table(layout: Layout, checkpoint: Checkpoint, name: str) -> None:
    """Check a stored tensor with the values of the codes, if ``name`` is one.

    Raises:
        ValueError: a value differs from the format's by more than rounding.
    """
    if layout.table is None or not name.endswith(layout.table):
        return
    values = checkpoint.read(name).float().flatten()
    own = torch.tensor(layout.fmt.values, device=values.device)
    if values.shape != own.shape or not torch.allclose(values, own, atol=1e-3):
        raise ValueError(
            f"{checkpoint.path}: {name} gives the codes the values {values.tolist()[:3]} ...; expected those of "
            f"{layout.fmt.name}, {own.tolist()[:3]} ...: it is of another format"
        )


def quantization_config(path: Path) -> Mapping | None:
    """Return the quantisation config of a checkpoint, from config.json or ModelOpt's file; None if it has none.

    Raises:
        ValueError: the config, its groups or a group is no mapping.
    """
    config = read_json(path / CONFIG).get("quantization_config")
    if config is None and (path / MODELOPT_CONFIG).is_file():
        inner = read_json(path / MODELOPT_CONFIG).get("quantization", {})
        _require_mapping(path / MODELOPT_CONFIG, "quantization", inner)
        config = {"quant_method": "modelopt", **inner}
    if config is None:
        return None
    _require_mapping(path / CONFIG, "quantization_config", config)
    groups = config.get("config_groups") or {}
    _require_mapping(path / CONFIG, "quantization_config.config_groups", groups)
    for name, group in groups.items():
        _require_mapping(path / CONFIG, f"quantization_config.config_groups.{name}", group)
        _require_mapping(path / CONFIG, f"quantization_config.config_groups.{name}.weights", group.get("weights") or {})
    return config


def _require_mapping(file: Path, name: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{file}: {name} is {str(value)[:80]!r}; expected a mapping")


def read_layout(path: Path) -> Layout | None:
    """Return the layout of a checkpoint folder according to its quantisation config; None if it is not quantised.

    Raises:
        ValueError: the quantisation is not supported.
    """
    config = quantization_config(path)
    if config is None:
        return None
    method = config.get("quant_method")
    variant = config.get(_VARIANT_KEYS.get(str(method), "quant_algo"))
    layouts: dict[tuple[object, object], Layout] = {
        ("compressed-tensors", "nvfp4-pack-quantized"): COMPRESSED_NVFP4,
        ("compressed-tensors", "mxfp4-pack-quantized"): COMPRESSED_MXFP4,
        ("modelopt", "NVFP4"): MODELOPT_NVFP4,
        ("modelopt", "W4A16_NVFP4"): MODELOPT_NVFP4,
        ("bitsandbytes", "nf4"): BITSANDBYTES_NF4,
    }
    layout = layouts.get((method, variant))
    if layout is None:
        raise ValueError(f"{path} is quantised by {method!r} as {variant!r}; we read {_KNOWN}")
    if method == "bitsandbytes" and config.get("bnb_4bit_use_double_quant"):
        raise ValueError(f"{path} quantises its scales too (double quantisation); we read {_KNOWN}")
    if method != "bitsandbytes" and variant != "W4A16_NVFP4" and not _keeps_activations(config):
        raise ValueError(f"{path} quantises activations too ({variant}, W4A4); we read {_KNOWN}")
    check_group_sizes(path, config, layout.fmt.block)
    if config.get("kv_cache_scheme") or config.get("kv_cache_quant_algo"):
        raise ValueError(f"{path} quantises the key/value cache; we read {_KNOWN}")
    return layout


def check_group_sizes(path: Path, config: Mapping, block: int) -> None:
    """Check that a quantisation config gives the number of columns that share a scale as the format has it.

    Raises:
        ValueError: it gives another number; names the key.
    """
    groups = [group for group in (config.get("config_groups") or {}).values() if isinstance(group, Mapping)]
    given = [("group_size", config.get("group_size")), ("blocksize", config.get("blocksize"))]
    given += [("config_groups.weights.group_size", (group.get("weights") or {}).get("group_size")) for group in groups]
    for key, size in given:
        if size is not None and size != block:
            raise ValueError(
                f"{path / CONFIG}: quantization_config has {key} {size!r}; its format has {block} weights to a scale, "
                "so either is wrong: take config.json from the folder that the weights are from"
            )


def _keeps_activations(config: Mapping) -> bool:
    # ModelOpt's algorithm "NVFP4" also quantises activations, unless the config has groups and none has
    # "input_activations".
    groups = list((config.get("config_groups") or {}).values())
    return bool(groups) and all(isinstance(group, dict) and not group.get("input_activations") for group in groups)
