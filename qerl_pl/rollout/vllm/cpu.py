"""What vLLM's CPU platform lacks: NVFP4 weights with 16-bit activations, and adapters without a copy for every token.

Only vLLM and ``plugin`` import this module, on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from vllm.config.lora import LoRAConfig
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.compressed_tensors.schemes import CompressedTensorsScheme
from vllm.model_executor.parameter import GroupQuantScaleParameter, ModelWeightParameter, PerTensorScaleParameter

from qerl_pl.quant.nvfp4 import BLOCK, NVFP4Weight, dequantize


class NVFP4Config(CompressedTensorsConfig):
    """compressed-tensors checkpoints as vLLM reads them, but for NVFP4 weights with 16-bit activations."""

    def get_scheme(self, layer: nn.Module, layer_name: str | None = None) -> CompressedTensorsScheme | None:
        """How a linear is stored and computed; None: it is not quantised."""
        found = self.get_scheme_dict(layer, layer_name) or {}
        if found.get("format") == "nvfp4-pack-quantized" and found["input_activations"] is None:
            return NVFP4Scheme()
        return super().get_scheme(layer, layer_name)


class NVFP4Scheme(CompressedTensorsScheme):
    """One linear, or several fused along N (q/k/v, gate/up), dequantised when the checkpoint is loaded.

    The dense copy costs memory, which a CPU has. Packed weights unpacked in every call are 2 to 8 times slower, the
    more the fewer tokens there are: 3.0 against 1.2 ms for a block of hidden size 128 at 256 tokens.
    """

    @classmethod
    def get_min_capability(cls) -> int:
        """Of a GPU; none is needed."""
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
        """Parameters by the names in the checkpoint, which vLLM's loader fills."""
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
        """Unpack every part with its own global scale (vLLM's kernels take the largest of them for all)."""
        codes = layer.get_parameter("weight_packed").data.split(self.part_rows)
        scales = layer.get_parameter("weight_scale").data.view(torch.uint8).split(self.part_rows)
        multipliers = 1 / layer.get_parameter("weight_global_scale").data.double()
        parts = zip(codes, scales, multipliers, strict=True)
        dense = torch.cat([dequantize(NVFP4Weight(*part), self.dtype) for part in parts])
        del layer.weight_packed, layer.weight_scale, layer.weight_global_scale
        layer.weight = nn.Parameter(dense, requires_grad=False)

    def apply_weights(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[T, K] -> [T, N]."""
        return F.linear(x, layer.get_parameter("weight"), bias)


class OneAdapterKernels(PunicaWrapperCPU):
    """y += x A^T B^T as two matrix products for all tokens, where vLLM gathers a copy of A and B for each of them.

    For one adapter slot. Tokens of requests without the adapter keep their y; in vLLM 0.32 they get the adapter.
    """

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
        """y: [T, N] in place; x: [T, K]; A and B: one [1, 1, R, K] and [1, 1, n, R] for each slice of N."""
        with_adapter = self.token_lora_indices >= 0  # [T]
        if not with_adapter.any():
            return
        for slice_y, a, b in zip(y.split(output_slices, dim=1), lora_a_stacked, lora_b_stacked, strict=True):
            update = F.linear(F.linear(x, a[0, 0]), b[0, 0]).mul_(scale)
            slice_y += update.mul_(with_adapter.unsqueeze(1))


def adapter_kernels(
    max_num_batched_tokens: int, max_batches: int, device: torch.device, *, lora_config: LoRAConfig
) -> PunicaWrapperCPU:
    """vLLM's adapter kernels: ours for one adapter slot, its own for more."""
    kernels = OneAdapterKernels if lora_config.max_loras == 1 else PunicaWrapperCPU
    return kernels(max_num_batched_tokens, max_batches, device, lora_config=lora_config)
