"""Count the floating-point operations of a training pass and look up a GPU's peak rate, for the model FLOPs utilisation
(MFU)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qerl_pl.model.layers import attention_windows, head_dims, num_recurrent_layers
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
"""Peak dense bf16 operations per second, accumulated in fp32, by a part of the GPU's name (NVIDIA's data sheets)."""


def peak_flops(device_name: str) -> float | None:
    """Look up a GPU's peak by its name from ``torch.cuda.get_device_name``: the longest entry of ``PEAK_BF16`` whose
    words are all in it; None if there is none."""
    words = device_name.replace("-", " ").split()
    known = [name for name in PEAK_BF16 if all(word in words for word in name.split())]
    return PEAK_BF16[max(known, key=len)] if known else None


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a model that decide how many floating-point operations a token costs."""

    frozen: int
    """Number of weights of the linears in all decoder blocks, without the adapter."""
    adapter: int
    """Parameters of the adapter's matrices."""
    head: int
    """Number of weights of the output head, which is computed for sampled tokens only."""
    attention: int
    """Number of attention heads times the dimension of a head, summed over the layers that attend to all earlier
    tokens."""
    windows: tuple[tuple[int, int], ...] = ()
    """Windows of sliding-window attention in tokens, each with heads times dimension of a head, summed over the layers
    with this window."""
    recurrent: int = 0
    """Number of values of the recurrent states of all layers with linear attention (gated delta nets)."""

    @classmethod
    def of(cls, policy: Policy) -> ModelSize:
        """Return the sizes of a policy's model."""
        config, head = policy.config, policy.model.get_output_embeddings()
        linears = [module for module in policy.model.modules() if isinstance(module, nn.Linear | FrozenLinear)]
        adapter = sum(p.numel() for name, p in policy.model.named_parameters() if "lora_" in name and p.ndim == 2)
        everything = sum(linear.in_features * linear.out_features for linear in linears if linear is not head)
        widths: dict[int | None, int] = {}
        for window, dim in zip(attention_windows(config), head_dims(config), strict=True):
            widths[window] = widths.get(window, 0) + config.num_attention_heads * dim
        full = widths.pop(None, 0)
        recurrent = 0
        if widths.pop(0, 0):
            state = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
            recurrent = num_recurrent_layers(config) * state
        return cls(
            frozen=everything - adapter,  # LoRA matrices are nn.Linear, so ``everything`` includes them
            adapter=adapter,
            head=config.hidden_size * config.vocab_size,
            attention=full,
            windows=tuple((window, width) for window, width in widths.items() if window),
            recurrent=recurrent,
        )


def training_flops(size: ModelSize, lengths: Tensor, sampled: Tensor, reused: Tensor | None = None) -> float:
    """Count the floating-point operations of one forward and backward pass, without the recomputation in backward.

    A frozen weight costs 2 operations per token in the forward pass and 2 in the backward pass, where it needs no
    gradient of its own; a trained weight costs 2 and 4. Causal attention of a row of S tokens costs 2 S^2 operations
    per layer, head and dimension of a head in the forward pass, and twice as many in the backward pass; with a window
    of W < S tokens, 2 (S^2 - (S - W)^2). A recurrent state costs 6 operations per value and token in the forward pass
    (a product with the key, an outer product, a product with the query), and twice as many in the backward pass.

    Args:
        size: sizes of the policy's model.
        lengths: [B] number of tokens of each row.
        sampled: [B] number of tokens of each row whose log-probability is computed.
        reused: [B] number of prompt tokens of each row that are not computed for this row, because another row with the
            same prompt shares them; None means 0.
    """
    reused = torch.zeros_like(lengths) if reused is None else reused
    tokens, scored = float((lengths - reused).sum()), float(sampled.sum())
    attended = sum(
        width * (_pairs(lengths, window) - _pairs(reused, window))
        for window, width in ((None, size.attention), *size.windows)
    )
    linears = (4 * size.frozen + 6 * size.adapter) * tokens + 4 * size.head * scored
    return linears + 6 * attended + 18 * size.recurrent * tokens


def _pairs(lengths: Tensor, window: int | None) -> float:
    # twice the area of the attention matrices below the diagonal and within the window, over all rows
    lengths = lengths.to(torch.float64)
    outside = 0.0 if window is None else (lengths - window).clamp(min=0).square().sum()
    return float(lengths.square().sum() - outside)
