"""How checkpoints write packed weights: which tensors make one up, and how they convert to our convention."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from qerl_pl.quant.files import CONFIG, read_json
from qerl_pl.quant.nvfp4 import BLOCK, NVFP4Weight, scale_divisor

COMPRESSED_FORMAT = "nvfp4-pack-quantized"
MODELOPT_CONFIG = "hf_quant_config.json"
KNOWN_FORMATS = (
    f"unquantised, compressed-tensors {COMPRESSED_FORMAT} (W4A16), ModelOpt NVFP4 with 16-bit activations (W4A16_NVFP4)"
)


@dataclass(frozen=True)
class Part:
    """How one tensor of a packed weight is stored: the buffer it fills and the conversion to our convention."""

    buffer: str
    convert: Callable[[Tensor], Tensor]


def as_is(tensor: Tensor) -> Tensor:
    """The tensor itself."""
    return tensor


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def _multiplier_bits(tensor: Tensor) -> Tensor:
    return tensor.double().squeeze().view(torch.int64)


def _divisor_bits(tensor: Tensor) -> Tensor:
    return _multiplier_bits(1 / tensor.double())


PARTS: Mapping[str, Mapping[str, Part]] = {
    "compressed-tensors": {
        "weight_packed": Part("codes", as_is),
        "weight_scale": Part("block_scale", _bits),
        "weight_global_scale": Part("global_scale_bits", _divisor_bits),
    },
    "modelopt": {
        "weight": Part("codes", as_is),
        "weight_scale": Part("block_scale", _bits),
        "weight_scale_2": Part("global_scale_bits", _multiplier_bits),
    },
    "unquantised": {},
}


def compressed_tensors_state(name: str, weight: NVFP4Weight) -> dict[str, Tensor]:
    """The tensors that compressed-tensors stores for the packed weight of linear ``name``."""
    return {
        f"{name}.weight_packed": weight.codes,
        f"{name}.weight_scale": weight.block_scale.view(torch.float8_e4m3fn),
        f"{name}.weight_global_scale": scale_divisor(weight.global_scale).view(1),
    }


def compressed_tensors_config(ignore: Sequence[str]) -> dict[str, object]:
    """What config.json says for compressed-tensors' readers: its scheme NVFP4A16 on every linear but the ignored."""
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": BLOCK,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": "torch.float8_e4m3fn",
    }
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
        "format": COMPRESSED_FORMAT,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": COMPRESSED_FORMAT,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def quantization_layout(path: Path) -> str:
    """Which of ``PARTS`` the checkpoint is written in.

    Raises:
        ValueError: its quantisation is none that we read.
    """
    config = read_json(path / CONFIG).get("quantization_config")
    if config is None and (path / MODELOPT_CONFIG).is_file():
        config = {"quant_method": "modelopt", **read_json(path / MODELOPT_CONFIG).get("quantization", {})}
    if config is None:
        return "unquantised"
    method = config.get("quant_method")
    groups = list((config.get("config_groups") or {}).values())
    if method == "compressed-tensors":
        written_as = config.get("format")
        known = written_as == COMPRESSED_FORMAT
    else:
        written_as = config.get("quant_algo")
        # ModelOpt also says "NVFP4" where the activations of no group are quantised.
        known = method == "modelopt" and written_as in ("NVFP4", "W4A16_NVFP4")
    if not known:
        raise ValueError(
            f"{path} is quantised by {method!r} as {written_as!r}; the formats that we read: {KNOWN_FORMATS}"
        )
    groups_keep_activations = all(isinstance(group, dict) and not group.get("input_activations") for group in groups)
    weights_only = written_as == "W4A16_NVFP4" or (groups and groups_keep_activations)
    if not weights_only:
        raise ValueError(
            f"{path} quantises activations too ({written_as}, W4A4); the formats that we read: {KNOWN_FORMATS}"
        )
    if config.get("kv_cache_scheme") or config.get("kv_cache_quant_algo"):
        raise ValueError(f"{path} quantises the key/value cache; we read {KNOWN_FORMATS}")
    return "modelopt" if method == "modelopt" else "compressed-tensors"
