"""Record of the experts that the routers of a mixture-of-experts (MoE) model choose in vLLM, by slot of the KV cache.

The indices of a token's experts are stored under the number of the slot that holds the token's keys and values in the
KV cache. vLLM already assigns slots correctly where requests share a prompt, are preempted, or have drafts rejected, so
none of these cases needs code here. vLLM 0.32 has a recorder of its own (``enable_return_routed_experts``), which needs
its prefix cache and its model runner V2, and so does not work on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer

from qerl_pl.quant.experts import Routing


class RouteRecorder:
    """Recorder of the experts that the routers of one vLLM model choose for each token."""

    def __init__(self, routing: Routing) -> None:
        self.routing = routing
        self._chosen: Tensor | None = None
        """[slots + 1, L, k] int16, for each slot of the KV cache the k experts in each of L MoE layers, -1 where
        nothing was recorded. The last row is written for padding, whose slot is -1."""

    def bind(self, model: nn.Module, config: VllmConfig) -> None:
        """Make the routers of vLLM's model call ``capture`` in every forward pass. Raises ValueError if a kernel or
        router does not support this, or if trainer and vLLM have different numbers of MoE layers."""
        layers = sorted({module.layer_id for module in model.modules() if isinstance(module, MoERunner)})
        if len(layers) != self.routing.num_layers:
            raise ValueError(f"vLLM has {len(layers)} mixtures of experts, the trainer {self.routing.num_layers}")
        self._numbers = {layer: number for number, layer in enumerate(layers)}
        named = config.compilation_config.static_forward_context.items()
        self.attention, self._layer = next((name, layer) for name, layer in named if isinstance(layer, Attention))
        """Name of the first attention layer, whose slots in the KV cache say where a token's experts are stored. (Delta
        nets cannot be used: they have slots for states and not for tokens.)"""
        bind_routed_experts_capturer(model, self)  # pyright: ignore[reportArgumentType]

    def capture(self, layer_id: int, topk_ids: Tensor) -> None:
        """Store the k experts that the router of the MoE layer ``layer_id`` has chosen for each of the n tokens of a
        forward pass, ``topk_ids`` [n, k], by the tokens' slots in the KV cache. vLLM's routers call this, also while a
        CUDA graph is captured."""
        mappings, layer = get_forward_context().slot_mapping, self._layer
        if not mappings or not layer.kv_cache.numel():
            return  # a pass without a KV cache, which measures memory
        assert isinstance(mappings, dict)
        slots = mappings[self.attention]
        rows = layer.kv_cache.numel() // (layer.num_kv_heads * (layer.head_size + layer.head_size_v)) + 1
        if self._chosen is None or len(self._chosen) < rows:
            shape = rows, self.routing.num_layers, self.routing.chosen
            self._chosen = torch.full(shape, -1, dtype=torch.int16, device=topk_ids.device)
        self._chosen[slots, self._numbers[layer_id]] = topk_ids[: len(slots)].to(torch.int16)

    @torch.inference_mode()  # in which the tensor was made
    def clear(self) -> None:
        """Forget all tokens."""
        if self._chosen is not None:
            self._chosen.fill_(-1)

    def read(self, blocks: Sequence[int], size: int, num_tokens: int) -> Tensor:
        """Return the indices, stored by ``capture``, of the k experts that were chosen in each of L MoE layers for the
        first ``num_tokens`` tokens of a sequence, [num_tokens, L, k] int16. ``blocks`` are the numbers of the
        sequence's blocks in the KV cache, of ``size`` slots each. On a GPU, the result is being copied to the host when
        the call returns: synchronise before reading it."""
        assert self._chosen is not None
        slots = (torch.tensor(blocks).unsqueeze(1) * size + torch.arange(size)).flatten()[:num_tokens]
        return self._chosen[slots.to(self._chosen.device)].to("cpu", non_blocking=True)
