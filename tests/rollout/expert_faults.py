"""Faults of the LoRA adapters on experts in vLLM: in the tensors that hold the adapters (``SLOTS``), and in the values
that the kernel reads (``KERNELS``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def expert_adapters(engine: Any) -> Any:
    """Return the layer of vLLM's model that holds the adapters on the experts of its first mixture."""
    modules = engine._call(lambda worker: list(worker.get_model().modules()))
    return next(module for module in modules if hasattr(module, "adapter_enabled"))


def exchange_gate_and_up(module: Any) -> None:
    gate, up = module.w13_lora_b_stacked
    gate[:], up[:] = up.clone(), gate.clone()


def shift_experts(module: Any) -> None:
    for stack in (*module.w2_lora_a_stacked, *module.w2_lora_b_stacked):
        stack[:] = stack.roll(1, dims=1)


def read_by_kernel(**others: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Make a fault by which the kernel reads other values than the layer holds. Each argument has the name of an
    attribute that the kernel reads, and is a function that returns, for the layer, what the kernel reads instead."""

    def change(module: Any) -> None:
        for name, value in others.items():
            setattr(module._moe_kernel.fused_experts._lora_context, name, value(module))

    return change


def heal(module: Any) -> None:
    """Undo every fault; the slots are right after the next adapter is loaded."""
    module.adapter_enabled.fill_(1)
    module.set_mapping(module.punica_wrapper)


SLOTS: dict[str, Callable[[Any], object]] = {
    "adapter flag 0": lambda module: module.adapter_enabled.zero_(),
    "gate and up exchanged": exchange_gate_and_up,
    "slot of the next expert": shift_experts,
    "two values of one A": lambda module: module.w13_lora_a_stacked[1][0, 3, 1].mul_(2),
}
KERNELS: dict[str, Callable[[Any], object]] = {
    "kernel without adapters": read_by_kernel(adapter_enabled=lambda module: torch.zeros_like(module.adapter_enabled)),
    "kernel exchanges gate and up": read_by_kernel(w13_lora_b_stacked=lambda m: m.w13_lora_b_stacked[::-1]),
    "kernel of the next expert": read_by_kernel(
        w2_lora_b_stacked=lambda m: tuple(stack.roll(1, dims=1) for stack in m.w2_lora_b_stacked)
    ),
}
FAULTS = SLOTS | KERNELS
