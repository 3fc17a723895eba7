"""Describe how packed weights are written to a checkpoint: for each format the tensors of a weight, and
``quantization_config`` of config.json.

NVFP4 and MXFP4 are written in the layout of compressed-tensors, which unmodified vLLM and transformers can load, and
NF4 in the layout of bitsandbytes, which unmodified transformers can load.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qerl_pl.quant.formats import Format, PackedWeight
from qerl_pl.quant.layouts import BITSANDBYTES_NF4, COMPRESSED_MXFP4, COMPRESSED_NVFP4, Layout
from qerl_pl.quant.nf4 import NF4, NF4_VALUES
from qerl_pl.quant.nvfp4 import scale_divisor


@dataclass(frozen=True)
class Writer:
    """Functions that write a format."""

    layout: Layout
    """Layout by which the written tensors are read."""
    tensors: Callable[[PackedWeight, torch.dtype], dict[str, Tensor]]
    """Maps a packed weight and the model's dtype to the tensors to write, by the suffix that follows the linear's
    name."""
    config: Callable[[Sequence[str], torch.dtype], dict[str, object]]
    """Maps the names of the linears that stay dense and the model's dtype to ``quantization_config`` of config.json."""

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


def _compressed_tensors_config(preset: str, written_as: str, ignored: Sequence[str]) -> dict[str, object]:
    """Build ``quantization_config`` for a checkpoint in which all linears except ``ignored`` have one preset scheme of
    compressed-tensors."""
    from compressed_tensors.config import CompressionFormat
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, QuantizationStatus
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme

    scheme: QuantizationScheme = preset_name_to_scheme(preset, ["Linear"])
    scheme.format = CompressionFormat(written_as)
    return QuantizationConfig(
        config_groups={"group_0": scheme},
        format=scheme.format.value,
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=list(ignored),
    ).to_dict()


def _nvfp4_config(ignored: Sequence[str], _dtype: torch.dtype) -> dict[str, object]:
    return _compressed_tensors_config("NVFP4A16", "nvfp4-pack-quantized", ignored)


def _mxfp4_config(ignored: Sequence[str], _dtype: torch.dtype) -> dict[str, object]:
    return _compressed_tensors_config("MXFP4A16", "mxfp4-pack-quantized", ignored)


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
