"""Rank of the adapter slots of experts in vLLM. It may differ from that of the slots of other linear layers, because
LoRA adapters on experts usually have a smaller rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from vllm.config import get_current_vllm_config

RANK = "expert_slot_rank"
"""Key in vLLM's setting ``additional_config`` under which the rank of the experts' adapter slots is passed."""


def of_own_rank(create: Callable[..., None]) -> Callable[..., None]:
    """Wrap vLLM's method that creates the adapter slots of the experts of an MoE layer, so that the slots get the rank
    that vLLM's setting ``additional_config`` has under the key ``RANK``; without this key, they get the rank of all
    other slots."""

    def create_lora_weights(self: Any, max_loras: int, lora_config: Any, model_config: Any = None) -> None:
        settings: Any = get_current_vllm_config().additional_config
        rank = settings.get(RANK, lora_config.max_lora_rank)
        create(self, max_loras, replace(lora_config, max_lora_rank=rank), model_config)

    return create_lora_weights
