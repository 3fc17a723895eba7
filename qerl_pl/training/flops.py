"""Floating-point operations of a training pass, and what a GPU could do at most: model FLOPs utilisation (MFU)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qerl_pl.base.layers import head_dims
from qerl_pl.policy.policy import Policy
from qerl_pl.quant.linear import FrozenLinear

PEAK_BF16 = {
    "B200": 2.25e15,
    "H200": 989e12,
    "GH200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10G": 70e12,
    "RTX 5090": 209e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}
"""Dense bf16 operations per second with fp32 sums, by what the name of a GPU contains (NVIDIA's data sheets)."""


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 operations per second of a GPU; None where they are not known.

    Args:
        device_name: as ``torch.cuda.get_device_name`` gives it. The longest name of the table that it contains counts.
    """
    words = device_name.replace("-", " ").split()
    known = [name for name in PEAK_BF16 if all(word in words for word in name.split())]
    return PEAK_BF16[max(known, key=len)] if known else None


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a model that decide how many operations a token costs."""

    frozen: int
    """Weights of the linears of all blocks, without the adapter."""
    adapter: int
    """Parameters of the adapter's matrices."""
    head: int
    """Weights of the output head, which only sampled tokens pass."""
    attention: int
    """Heads times the dimension of a head, summed over the layers."""

    @classmethod
    def of(cls, policy: Policy) -> ModelSize:
        """Count a policy's parameters by its modules and its configuration."""
        config, head = policy.config, policy.model.get_output_embeddings()
        linears = [module for module in policy.model.modules() if isinstance(module, nn.Linear | FrozenLinear)]
        adapter = sum(p.numel() for name, p in policy.model.named_parameters() if "lora_" in name and p.ndim == 2)
        everything = sum(linear.in_features * linear.out_features for linear in linears if linear is not head)
        return cls(
            frozen=everything - adapter,  # PEFT's matrices are linears too
            adapter=adapter,
            head=config.hidden_size * config.vocab_size,
            attention=config.num_attention_heads * sum(head_dims(config)),
        )


def training_flops(size: ModelSize, lengths: Tensor, sampled: Tensor, reused: Tensor | None = None) -> float:
    """Count the operations of one forward and backward pass; recomputation in backward is not counted.

    A frozen weight costs 2 operations per token forward and 2 backward (no gradient of its own), a trained one 2 and 4.
    Attention of a row of S tokens costs 2 S^2 operations per layer and unit of width forward (causal: half of the
    products), twice that backward.

    Args:
        size: of the policy.
        lengths: [B] tokens of each row.
        sampled: [B] tokens of each row whose log-probability is computed.
        reused: [B] tokens of each row, its first ones, that are computed for another row (shared prompts); None means
            none.
    """
    reused = torch.zeros_like(lengths) if reused is None else reused
    tokens, scored = float((lengths - reused).sum()), float(sampled.sum())
    pairs = float((lengths.to(torch.float64).square() - reused.to(torch.float64).square()).sum())
    return (4 * size.frozen + 6 * size.adapter) * tokens + 4 * size.head * scored + 6 * size.attention * pairs
