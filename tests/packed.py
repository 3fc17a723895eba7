"""Packed weights, and the linear layers that hold them, for tests and benchmarks."""

from torch import Tensor

from qerl_pl.quant.formats import Format, PackedWeight, quantize
from qerl_pl.quant.linear import FrozenLinear
from qerl_pl.quant.nvfp4 import NVFP4


def frozen_linear(weight: PackedWeight, bias: Tensor | None = None, fmt: Format = NVFP4) -> FrozenLinear:
    """Make a frozen linear layer that holds these tensors themselves, not copies."""
    num_rows, num_bytes = weight.codes.shape
    layer = FrozenLinear(2 * num_bytes, num_rows, fmt, device="meta")
    layer.packed = weight
    layer.bias = bias
    return layer


def quantize_nvfp4(weight: Tensor, global_scale: Tensor | None = None, *, name: str = "weight") -> PackedWeight:
    """Round a matrix [N, K] to the nearest NVFP4 values under min-max scales."""
    return quantize(weight, NVFP4, global_scale, name=name)
