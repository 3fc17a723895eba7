"""Additions to vLLM's CPU platform: NVFP4 weights with 16-bit activations, and LoRA adapters."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from vllm.config.lora import LoRAConfig
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsScheme
from vllm.model_executor.parameter import GroupQuantScaleParameter, ModelWeightParameter, PerTensorScaleParameter

from qerl_pl.quant.formats import PackedWeight
from qerl_pl.quant.nvfp4 import BLOCK, dequantize
from qerl_pl.rollout.vllm.cpu_experts import NVFP4Experts


class NVFP4Config(CompressedTensorsConfig):
    """Configuration class of compressed-tensors checkpoints, extended by NVFP4 weights with 16-bit activations."""

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """Return the object with which vLLM stores and computes a layer: ``NVFP4Experts`` for the experts of an MoE
        layer in NVFP4, and otherwise what vLLM's own class returns."""
        if isinstance(layer, RoutedExperts):
            self._add_fused_moe_to_target_scheme_map()
            if _is_w4a16(self.get_scheme_dict(layer, f"{prefix}.0.{layer.ckpt_down_proj_name}")):
                return NVFP4Experts(layer.moe_config)
        return super().get_quant_method(layer, prefix)

    def get_scheme(self, layer: nn.Module, layer_name: str | None = None) -> CompressedTensorsScheme | None:
        """Return the object by which vLLM stores and computes a linear; None if the linear is not quantised."""
        if _is_w4a16(self.get_scheme_dict(layer, layer_name)):
            return NVFP4Scheme()
        return super().get_scheme(layer, layer_name)


def _is_w4a16(scheme: Mapping | None) -> bool:
    return scheme is not None and scheme.get("format") == "nvfp4-pack-quantized" and scheme["input_activations"] is None


class NVFP4Scheme(CompressedTensorsScheme):
    """Scheme, in vLLM's sense, for (fused) linear layers in NVFP4. Their weights are dequantised once, after loading.
    Dequantising them in every call would take less memory, but was measured to be slower, by a factor of 2 (many
    tokens) to 8 (few tokens)."""

    @classmethod
    def get_min_capability(cls) -> int:
        """Return 0: no compute capability of a GPU is needed."""
        return 0

    def create_weights(
        self,
        layer: nn.Module,
        output_partition_sizes: list[int],
        input_size_per_partition: int,
        params_dtype: torch.dtype,
        weight_loader: Callable[..., None],
        **_: object,
    ) -> None:
        """Create the parameters of a linear with 4-bit weights under their names in the checkpoint."""
        self.part_rows, self.dtype = output_partition_sizes, params_dtype
        num_rows, num_columns = sum(output_partition_sizes), input_size_per_partition
        codes = torch.empty(num_rows, num_columns // 2, dtype=torch.uint8)
        scales = torch.empty(num_rows, num_columns // BLOCK, dtype=torch.float8_e4m3fn)
        divisors = torch.empty(len(output_partition_sizes), dtype=torch.float32)
        matrix = {"input_dim": 1, "output_dim": 0, "weight_loader": weight_loader}
        layer.register_parameter("weight_packed", ModelWeightParameter(data=codes, **matrix))
        layer.register_parameter("weight_scale", GroupQuantScaleParameter(data=scales, **matrix))
        layer.register_parameter(
            "weight_global_scale", PerTensorScaleParameter(data=divisors, weight_loader=weight_loader)
        )

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Replace the 4-bit weight of a linear layer by a dequantised one. Each of the layers that are fused into it is
        dequantised with its own tensor scale, whereas vLLM's GPU kernels use the largest of their scales for all."""
        codes = layer.get_parameter("weight_packed").data.split(self.part_rows)
        scales = layer.get_parameter("weight_scale").data.view(torch.uint8).split(self.part_rows)
        multipliers = 1 / layer.get_parameter("weight_global_scale").data.double()
        parts = zip(codes, scales, multipliers, strict=True)
        dense = torch.cat([dequantize(PackedWeight(*part), self.dtype) for part in parts])
        del layer.weight_packed, layer.weight_scale, layer.weight_global_scale
        layer.weight = nn.Parameter(dense, requires_grad=False)

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute the linear for T tokens, x [T, K], with K inputs and N outputs; returns [T, N]."""
        return F.linear(x, layer.get_parameter("weight"), bias)


class OneAdapterKernels(PunicaWrapperCPU):
    """LoRA kernels for vLLM on a CPU with one adapter slot. Two matrix products compute x A^T B^T for all tokens; the
    result is added to y for tokens whose request uses the adapter. vLLM 0.32's own kernels gather a copy of A and B per
    token, which is slower, and also add the adapter to tokens of requests without it, which is wrong."""

    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **_: object,
    ) -> None:
        """Add the output of a linear layer's LoRA adapter of rank R, times ``scale``, to y [T, N] in place, for x [T,
        K]. ``output_slices`` has the number of outputs n of each of the layers that are fused into it; each has A [1,
        1, R, K] and B [1, 1, n, R]."""
        with_adapter = self.token_lora_indices >= 0  # [T]
        if not with_adapter.any():
            return
        for slice_y, a, b in zip(y.split(output_slices, dim=1), lora_a_stacked, lora_b_stacked, strict=True):
            update = F.linear(F.linear(x, a[0, 0]), b[0, 0]).mul_(scale)
            slice_y += update.mul_(with_adapter.unsqueeze(1))


def adapter_kernels(
    max_num_batched_tokens: int, max_batches: int, device: torch.device, *, lora_config: LoRAConfig
) -> PunicaWrapperCPU:
    """Create the object with which vLLM computes LoRA adapters on a CPU: ``OneAdapterKernels`` if vLLM has a single
    adapter slot, else an object of vLLM's own class. vLLM imports this function by its name (``patches``)."""
    kernels = OneAdapterKernels if lora_config.max_loras == 1 else PunicaWrapperCPU
    return kernels(max_num_batched_tokens, max_batches, device, lora_config=lora_config)
