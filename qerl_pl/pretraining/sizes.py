"""Sizes of the policies that pretraining makes."""

from __future__ import annotations

SHAPES: dict[str, dict[str, int]] = {
    # Widths, and the output size of a fused q/k/v projection, are multiples of 256 except in "toy", as the NVFP4
    # kernels require.
    "toy": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    | {"num_key_value_heads": 1},
    "10m": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 12, "num_attention_heads": 4}
    | {"num_key_value_heads": 2},
    "30m": {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 9, "num_attention_heads": 8}
    | {"num_key_value_heads": 4},
}
"""Shapes of the Qwen2 model by the name of a size."""
LEARNING_RATES = {"toy": 3e-3, "10m": 1e-3, "30m": 6e-4}
"""Default learning rates by the name of a size."""
