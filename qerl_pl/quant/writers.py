"""What the quantiser writes for each format: the tensors of a packed weight, and what config.json says about them.

NVFP4 and MXFP4 are written as compressed-tensors does, so that stock vLLM and transformers load them; NF4 as
bitsandbytes does, so that stock transformers loads it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qerl_pl.quant.formats import Format, PackedWeight
from qerl_pl.quant.layouts import BITSANDBYTES_NF4, COMPRESSED_MXFP4, COMPRESSED_NVFP4, Layout
from qerl_pl.quant.mxfp4 import MXFP4
from qerl_pl.quant.nf4 import NF4, NF4_VALUES
from qerl_pl.quant.nvfp4 import NVFP4, scale_divisor


@dataclass(frozen=True)
class Writer:
    """How a format is stored."""

    layout: Layout
    """By which it is read again."""
    tensors: Callable[[PackedWeight, torch.dtype], dict[str, Tensor]]
    """(weight, dtype of the model) -> tensors by what follows the name of the linear."""
    config: Callable[[Sequence[str], torch.dtype], dict[str, object]]
    """(names of the linears that stay dense, dtype of the model) -> ``quantization_config`` of config.json."""

    @property
    def fmt(self) -> Format:
        return self.layout.fmt


def _nvfp4_tensors(weight: PackedWeight, _dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        ".weight_packed": weight.codes,
        ".weight_scale": weight.block_scale.view(torch.float8_e4m3fn),
        ".weight_global_scale": scale_divisor(weight.global_scale).view(1),
    }


def _mxfp4_tensors(weight: PackedWeight, _dtype: torch.dtype) -> dict[str, Tensor]:
    return {".weight_packed": weight.codes, ".weight_scale": weight.block_scale}


def _nf4_tensors(weight: PackedWeight, dtype: torch.dtype) -> dict[str, Tensor]:
    state = {
        "quant_type": "nf4",
        "blocksize": NF4.block,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": [weight.codes.shape[0], 2 * weight.codes.shape[1]],
    }
    return {
        ".weight": ((weight.codes >> 4) | (weight.codes << 4)).reshape(-1, 1),  # the even column is in the high nibble
        ".weight.absmax": weight.block_scale.view(torch.float32).flatten(),
        ".weight.quant_map": torch.tensor(NF4_VALUES),
        ".weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }


def _compressed_tensors_config(written_as: str, ignored: Sequence[str], **weights: object) -> dict[str, object]:
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False, **weights},
        "input_activations": None,
        "output_activations": None,
        "format": written_as,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": written_as,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignored),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _nvfp4_config(ignored: Sequence[str], _dtype: torch.dtype) -> dict[str, object]:
    scales = {"strategy": "tensor_group", "group_size": NVFP4.block, "scale_dtype": "torch.float8_e4m3fn"}
    return _compressed_tensors_config("nvfp4-pack-quantized", ignored, **scales)


def _mxfp4_config(ignored: Sequence[str], _dtype: torch.dtype) -> dict[str, object]:
    scales = {"strategy": "group", "group_size": MXFP4.block, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
    return _compressed_tensors_config("mxfp4-pack-quantized", ignored, **scales)


def _nf4_config(ignored: Sequence[str], dtype: torch.dtype) -> dict[str, object]:
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": False,
        "bnb_4bit_compute_dtype": str(dtype).removeprefix("torch."),
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": list(ignored),
    }


WRITERS = {
    "nvfp4": Writer(COMPRESSED_NVFP4, _nvfp4_tensors, _nvfp4_config),
    "mxfp4": Writer(COMPRESSED_MXFP4, _mxfp4_tensors, _mxfp4_config),
    "nf4": Writer(BITSANDBYTES_NF4, _nf4_tensors, _nf4_config),
}
