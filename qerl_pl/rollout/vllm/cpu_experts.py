"""Mixture-of-experts (MoE) layers on vLLM's CPU platform, computed by the same functions as in the trainer, with
weights in bf16, in fp32 or dequantised from NVFP4."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_nvfp4 as with_nvfp4,
)

from qerl_pl.quant.formats import PackedWeight
from qerl_pl.quant.grouped import grouped, sort_rows, summed
from qerl_pl.quant.nvfp4 import dequantize

PACKED = ("weight_packed", "weight_scale", "weight_global_scale")
"""Endings of the names of packed experts' parameters."""


class TorchExperts(LoRAExpertsMixin, CPUUnquantizedExperts):
    """Kernel class, in vLLM's sense, that computes experts by torch on a CPU. It leaves weights in the layout of the
    checkpoint, for comparison with the trainer's, and supports the LoRA adapter in vLLM's first slot only."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Leave the weights as they are."""

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        *_: object,
        **_more: object,
    ) -> None:
        """Compute an MoE layer for T tokens ``hidden_states`` [T, H]: write to ``output`` [T, H] the sum of the outputs
        of each token's k experts ``topk_ids`` [T, k], of E in all, times ``topk_weights`` [T, k]. ``w1`` [E, 2I, H] has
        the weights of gate and up, ``w2`` [E, H, I] those of down."""
        routes = sort_rows(topk_ids.long(), len(w1))
        tokens = routes.order // topk_ids.shape[1]
        rows = hidden_states[tokens]
        gate, up = (grouped(rows, part.mT, routes.ends) for part in w1.chunk(2, dim=1))
        adapters = self._lora_context
        if adapters is None or not adapters.adapter_enabled[0]:
            output.copy_(summed(grouped(F.silu(gate) * up, w2.mT, routes.ends), routes, topk_weights))
            return
        on = adapters.punica_wrapper.token_lora_indices[tokens].unsqueeze(1) >= 0  # [S, 1]: rows that have the adapter

        def update(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
            return on * grouped(grouped(x, a[0].mT, routes.ends), b[0].mT, routes.ends)

        for part, a, b in zip((gate, up), adapters.w13_lora_a_stacked, adapters.w13_lora_b_stacked, strict=True):
            part += update(rows, a, b)
        product = F.silu(gate) * up
        out = grouped(product, w2.mT, routes.ends)
        out += update(product, *adapters.w2_lora_a_stacked, *adapters.w2_lora_b_stacked)
        output.copy_(summed(out, routes, topk_weights))


class NVFP4Experts(UnquantizedFusedMoEMethod):
    """Quantisation method, in vLLM's sense, for experts in NVFP4 on a CPU: the weights are dequantised after loading,
    those of each expert with its own tensor scales."""

    group_size = 16

    def create_weights(self, layer: Any, *sizes: Any, **attributes: Any) -> None:
        """Create the parameters of packed experts under their names in the checkpoint."""
        with_nvfp4.CompressedTensorsW4A4Nvfp4MoEMethod.create_weights(self, layer, *sizes, **attributes)  # pyright: ignore[reportArgumentType]
        self.dtype = layer.params_dtype

    def process_weights_after_loading(self, layer: Any) -> None:
        """Replace the packed parameters by dense ones."""
        for name in ("w13", "w2"):
            codes, scales, divisors = (getattr(layer, f"{name}_{kind}").data for kind in PACKED)
            for kind in (*PACKED, "input_global_scale"):
                delattr(layer, f"{name}_{kind}")
            rows, blocks = codes.flatten(0, 1), scales.flatten(0, 1).view(torch.uint8)
            # one tensor scale per expert, or in w13 one for gate and one for up, whose rows follow each other
            dense = dequantize(PackedWeight(rows, blocks, 1 / divisors.double().flatten()), self.dtype)
            layer.register_parameter(
                f"{name}_weight", nn.Parameter(dense.view(*codes.shape[:2], -1), requires_grad=False)
            )
        super().process_weights_after_loading(layer)


def in_torch(select: Callable[[Any], tuple[Any, Any]]) -> Callable[[Any], tuple[Any, Any]]:
    """Make a replacement of the function by which vLLM chooses the kernel class of unquantised experts; it always
    chooses ``TorchExperts``."""
    return lambda moe_config: (UnquantizedMoeBackend.CPU, TorchExperts)
