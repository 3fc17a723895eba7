"""NVFP4 linears of vLLM on Hopper with the engine setting ``decoding_kernel`` "native": the kernel class that vLLM uses
for them, and how vLLM gets it.

``nvfp4.py`` has the operators. All kernels add partial sums in a fixed order, so equal inputs give equal bits. The
package humming-kernels is not needed. This module imports vLLM's base class of NVFP4 kernels, so the engine imports it
only if the native kernels can run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel, NvFp4LinearLayerConfig

from qerl_pl.kernels import hopper
from qerl_pl.kernels.nvfp4_decode import humming_bias
from qerl_pl.policy.policy import Policy
from qerl_pl.quant.formats import PackedWeight
from qerl_pl.quant.selection import fused_groups
from qerl_pl.quant.tile_order import fits, to_tile_order
from qerl_pl.rollout.vllm import base_weights, nvfp4
from qerl_pl.rollout.vllm.nvfp4_patches import native_nvfp4_linears
from qerl_pl.rollout.vllm.setup import decoding_lacks


class NativeLinear(NvFp4LinearKernel):
    """Kernel class for vLLM that computes an NVFP4 linear with 16-bit activations.

    A linear whose shape fits (``quant.tile_order.fits``) is rearranged after loading to tile order, which the native
    kernels read, and computed by ``nvfp4.nvfp4_linear``. Any other linear stays in row order, and is dequantised in
    every call.
    """

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Return True; ``setup.decoding_lacks`` has checked the machine."""
        return True, None

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        """Return True: every shape can be computed."""
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Convert the parameters of a linear to tile order if its shape fits: ``weight`` [N, K / 2] uint8,
        ``weight_scale`` [N, K / 16] e4m3, and ``weight_global_scale`` [] fp32, the tensor scale. Use the trainer's copy
        of the weights instead of vLLM's if it has the same layout."""
        base_weights.give(layer)
        codes, scales, factor = layer.weight.data, layer.weight_scale.data, layer.weight_global_scale.data.reshape(1)
        packed = PackedWeight(codes, scales.view(torch.uint8), factor)
        del layer.weight_global_scale
        if fits([(len(codes), 2 * codes.shape[1])]):
            packed = to_tile_order(packed)
            if (bias := getattr(layer, "bias", None)) is not None:
                bias.data = humming_bias(bias.data)
            nvfp4.prepare(len(codes), 2 * codes.shape[1], codes.device)
            layer.native = nvfp4.Native()
        layer.weight = _frozen(packed.codes)
        layer.weight_scale = _frozen(packed.block_scale.view(scales.dtype))
        layer.weight_scale_2 = _frozen(factor)
        base_weights.adopt(layer)

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute a linear without an adapter, [..., K] -> [..., N]."""
        if hasattr(layer, "native"):
            return nvfp4.call(layer, x, bias)
        weights = layer.weight, layer.weight_scale, layer.weight_scale_2
        y = torch.ops.qerl_pl.nvfp4_row_linear(x.reshape(-1, x.shape[-1]), *weights, bias)
        return y.view(*x.shape[:-1], y.shape[-1])


@contextmanager
def for_linears_of(policy: Policy, dtype: torch.dtype) -> Iterator[None]:
    """Make the NVFP4 linears that vLLM loads within this context use the kernel class ``NativeLinear``, also after the
    context. Start to compile the native kernels.

    Raises:
        ValueError: the native kernels do not support this GPU, format or dtype, or a package is missing.
    """
    if missing := decoding_lacks(policy.packed_format, dtype):
        raise ValueError(f"decoding_kernel is 'native', which needs {', and '.join(missing)}; set it to 'auto'")
    linears = policy.packed_linears()
    groups = fused_groups(list(linears), present=linears.keys()).values()
    shapes = {(sum(linears[name].out_features for name in group), linears[group[0]].in_features) for group in groups}
    for outputs, inputs in shapes:
        hopper.start_compiling(nvfp4.kernels_for(outputs, inputs))
    with native_nvfp4_linears(lambda: NativeLinear(NvFp4LinearLayerConfig()), nvfp4.apply_with_adapter):
        yield


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
