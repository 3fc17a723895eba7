"""Layouts of 4-bit weights in checkpoints: which tensors are stored for a linear layer, how they are read into the
buffers of ``FrozenLinear``, and how they are written: NVFP4 and MXFP4 as compressed-tensors does, for unmodified vLLM
and transformers, and NF4 as bitsandbytes does, for unmodified transformers."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from qerl_pl.model.files import Checkpoint
from qerl_pl.quant.formats import Format, PackedWeight
from qerl_pl.quant.linear import FrozenLinear
from qerl_pl.quant.mxfp4 import MXFP4
from qerl_pl.quant.nf4 import NF4, NF4_VALUES
from qerl_pl.quant.nvfp4 import NVFP4, scale_divisor


@dataclass(frozen=True)
class Part:
    """Destination of one tensor of a checkpoint when the model is loaded: the name of the module's buffer or parameter
    that the tensor fills, and the conversion that is applied to the tensor first."""

    buffer: str
    convert: Callable[[Tensor, Sequence[int]], Tensor] = lambda tensor, _shape: tensor
    """Converts the stored tensor, given the shape of the buffer; the caller checks that the result has this shape."""


@dataclass(frozen=True)
class Layout:
    """Way in which a checkpoint stores the weights of 4-bit linear layers."""

    fmt: Format
    parts: Mapping[str, Part]
    """Stored tensors of a 4-bit linear layer, by the suffix that follows the layer's name in the tensor's name."""
    marker: str
    """Suffix of a tensor that exists only for 4-bit linear layers, by which they are recognised."""
    redundant: tuple[str, ...] = ()
    """Suffixes of tensors of a 4-bit linear layer that are not needed for reading it."""
    table: str | None = None
    """Suffix of a tensor that stores the values of the 16 codes, which must be those of the format; None: there is no
    such tensor."""


def _bits(tensor: Tensor, _shape: Sequence[int]) -> Tensor:
    return tensor.view(torch.uint8)


def _scale_bits(scale: Tensor, _shape: Sequence[int] = ()) -> Tensor:
    return scale.double().squeeze().view(torch.int64)


def _swap_nibbles(codes: Tensor) -> Tensor:  # bitsandbytes has the even column in the high nibble
    return (codes >> 4) | (codes << 4)


def _reshaped(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    return tensor.reshape(shape) if tensor.numel() == math.prod(shape) else tensor


COMPRESSED_NVFP4 = Layout(
    fmt=NVFP4,
    parts={
        ".weight_packed": Part("codes"),
        ".weight_scale": Part("block_scale", _bits),
        ".weight_global_scale": Part("global_scale_bits", lambda divisor, _shape: _scale_bits(1 / divisor.double())),
    },
    marker=".weight_packed",
)
COMPRESSED_MXFP4 = Layout(
    fmt=MXFP4, parts={".weight_packed": Part("codes"), ".weight_scale": Part("block_scale")}, marker=".weight_packed"
)
MODELOPT_NVFP4 = Layout(
    fmt=NVFP4,
    parts={
        ".weight": Part("codes"),
        ".weight_scale": Part("block_scale", _bits),
        ".weight_scale_2": Part("global_scale_bits", _scale_bits),
    },
    marker=".weight_scale_2",
)
BITSANDBYTES_NF4 = Layout(
    fmt=NF4,
    parts={
        ".weight": Part("codes", lambda tensor, shape: _reshaped(_swap_nibbles(tensor), shape)),
        ".weight.absmax": Part("block_scale", lambda tensor, shape: _reshaped(tensor.float().view(torch.int32), shape)),
    },
    marker=".weight.absmax",
    redundant=(".weight.quant_map", ".weight.quant_state.bitsandbytes__nf4"),
    table=".weight.quant_map",
)


def packed_weight(tensors: Mapping[str, Tensor], name: str, layout: Layout, shape: tuple[int, int]) -> PackedWeight:
    """Build the 4-bit weight of the linear ``name`` from a checkpoint's tensors; ``shape`` is (N, K)."""
    num_rows, num_columns = shape
    layer = FrozenLinear(num_columns, num_rows, layout.fmt, device="meta")
    layer.global_scale_bits = torch.ones((), dtype=torch.float64).view(torch.int64)
    for suffix, part in layout.parts.items():
        setattr(layer, part.buffer, part.convert(tensors[name + suffix], getattr(layer, part.buffer).shape))
    return layer.packed


def check_table(layout: Layout, checkpoint: Checkpoint, name: str) -> None:
    """Check a tensor by which a checkpoint says which numbers its 4-bit codes stand for, as checkpoints by bitsandbytes
    do. Raises ValueError if these are not the numbers of the format ``layout.fmt``, because weights would be
    dequantised wrongly. If the tensor ``name`` is no such tensor, nothing is done."""
    if layout.table is None or not name.endswith(layout.table):
        return
    values = checkpoint.read(name).float().flatten()
    expected = torch.tensor(layout.fmt.values, dtype=values.dtype, device=values.device)
    if values.shape != expected.shape or not torch.allclose(values, expected, atol=1e-3):
        raise ValueError(
            f"{checkpoint.path}: {name} gives the codes the values {values.tolist()[:3]} ...; expected those of "
            f"{layout.fmt.name}, {expected.tolist()[:3]} ...: the weights are in another format"
        )


@dataclass(frozen=True)
class Writer:
    """Functions that store weights in a 4-bit format in a checkpoint."""

    layout: Layout
    """Layout by which the written tensors are read."""
    tensors: Callable[[PackedWeight, torch.dtype], dict[str, Tensor]]
    """Maps a 4-bit weight and the model's dtype to the tensors to store, by the suffix that follows the linear layer's
    name."""
    config: Callable[[Sequence[str], torch.dtype], dict[str, object]]
    """Maps the names of the linear layers that are not quantised, and the model's dtype, to ``quantization_config`` of
    config.json."""

    @property
    def fmt(self) -> Format:
        return self.layout.fmt


def _nvfp4_tensors(weight: PackedWeight, _dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        ".weight_packed": weight.codes,
        ".weight_scale": weight.block_scale.view(torch.float8_e4m3fn),
        ".weight_global_scale": scale_divisor(weight.global_scale).view(1),
    }


def _nf4_tensors(weight: PackedWeight, dtype: torch.dtype) -> dict[str, Tensor]:
    state = {
        "quant_type": "nf4",
        "blocksize": NF4.block,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": [weight.codes.shape[0], 2 * weight.codes.shape[1]],
    }
    return {
        ".weight": _swap_nibbles(weight.codes).reshape(-1, 1),
        ".weight.absmax": weight.block_scale.view(torch.float32).flatten(),
        ".weight.quant_map": torch.tensor(NF4_VALUES),
        ".weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }


def _compressed_tensors_config(
    preset: str, written_as: str, ignored: Sequence[str], _dtype: torch.dtype
) -> dict[str, object]:
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


_nvfp4_config = partial(_compressed_tensors_config, "NVFP4A16", "nvfp4-pack-quantized")
_mxfp4_config = partial(_compressed_tensors_config, "MXFP4A16", "mxfp4-pack-quantized")
WRITERS = {
    "nvfp4": Writer(COMPRESSED_NVFP4, _nvfp4_tensors, _nvfp4_config),
    "mxfp4": Writer(
        COMPRESSED_MXFP4,
        lambda weight, _dtype: {".weight_packed": weight.codes, ".weight_scale": weight.block_scale},
        _mxfp4_config,
    ),
    "nf4": Writer(BITSANDBYTES_NF4, _nf4_tensors, _nf4_config),
}
