"""Changes of vLLM's mixture-of-experts layers, which ``patches`` installs: routers with logits in fp32, as in the
trainer, and adapter slots of experts with a rank of their own, because LoRA adapters on experts usually have a smaller
rank than others."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from vllm.config import get_current_vllm_config

RANK = "expert_slot_rank"
"""Key in vLLM's setting ``additional_config`` under which the rank of the experts' adapter slots is passed."""


def router_in_fp32(self: Any, x: Tensor) -> Any:
    """Compute the logits [T, E] of a router for T tokens x [T, H] in fp32; replaces the ``forward`` of vLLM's router,
    which rounds them to 16 bits. On a GPU, one kernel multiplies bf16 inputs; this is as exact as converting the inputs
    to fp32 first, because products of bf16 numbers are exact in fp32."""
    weight = self.weight
    if x.is_cuda and x.dtype == weight.dtype == torch.bfloat16:
        logits = torch.mm(x, weight.T, out_dtype=torch.float32)
    else:
        logits = F.linear(x.float(), weight.float())
    return (logits, None) if self.return_bias else logits


def of_own_rank(create: Callable[..., None]) -> Callable[..., None]:
    """Wrap vLLM's method that creates the adapter slots of the experts of an MoE layer, so that the slots get the rank
    that vLLM's setting ``additional_config`` has under the key ``RANK``; without this key, they get the rank of all
    other slots."""

    def create_lora_weights(self: Any, max_loras: int, lora_config: Any, model_config: Any = None) -> None:
        settings: Any = get_current_vllm_config().additional_config
        rank = settings.get(RANK, lora_config.max_lora_rank)
        create(self, max_loras, replace(lora_config, max_lora_rank=rank), model_config)

    return create_lora_weights
