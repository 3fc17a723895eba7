"""NVFP4 linears of vLLM on Hopper without Humming: native kernels for decoding, and dequantising plus cuBLAS for
prompts and for shapes that the native kernels do not support.

All kernels used here add partial sums in a fixed order, so equal inputs give equal bits, which Humming's kernels do not
guarantee. The package humming-kernels is not needed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.library import Library
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel
from vllm.utils.torch_utils import direct_register_custom_op

from qerl_pl.kernels.nvfp4_decode import humming_bias
from qerl_pl.quant.formats import PackedWeight
from qerl_pl.quant.tile_order import fits, to_tile_order
from qerl_pl.rollout.vllm import base_weights, nvfp4

_LIBRARY = Library("qerl_pl", "FRAGMENT")  # torch unregisters a Library's operators when the Library object is deleted


class WithoutHumming(NvFp4LinearKernel):
    """Kernel class for vLLM that computes an NVFP4 linear with 16-bit activations without Humming.

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
        ``weight_scale`` [N, K / 16] e4m3, and ``weight_global_scale`` [] fp32, the tensor scale."""
        base_weights.give(layer)
        codes, scales, factor = layer.weight.data, layer.weight_scale.data, layer.weight_global_scale.data.reshape(1)
        packed = PackedWeight(codes, scales.view(torch.uint8), factor)
        del layer.weight_global_scale
        if fits([(len(codes), 2 * codes.shape[1])]):
            packed = to_tile_order(packed)
            if (bias := getattr(layer, "bias", None)) is not None:
                bias.data = humming_bias(bias.data)
            nvfp4.prepare(len(codes), 2 * codes.shape[1], codes.device)
            layer.decoding = torch.empty(0, dtype=torch.int32, device=codes.device), "", "", None
        layer.weight = _frozen(packed.codes)
        layer.weight_scale = _frozen(packed.block_scale.view(scales.dtype))
        layer.weight_scale_2 = _frozen(factor)
        base_weights.adopt(layer)

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute a linear without an adapter, [..., K] -> [..., N]."""
        if getattr(layer, "decoding", None) is not None:
            return nvfp4.call(layer, x, bias)
        weights = layer.weight, layer.weight_scale, layer.weight_scale_2
        y = torch.ops.qerl_pl.nvfp4_row_linear(x.reshape(-1, x.shape[-1]), *weights, bias)
        return y.view(*x.shape[:-1], y.shape[-1])


def _fake(x: Tensor, weight: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


direct_register_custom_op(
    "nvfp4_row_linear", nvfp4.dequantised_linear, mutates_args=[], fake_impl=_fake, target_lib=_LIBRARY
)


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
