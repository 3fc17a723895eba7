"""Kinds and sizes of a model's layers, which in some families (Gemma 4, Qwen3.5) differ from layer to layer."""

import re
from typing import Any

from transformers import PretrainedConfig

_BLOCK_OF = re.compile(r"^(.*\.layers\.\d+)\.")


def block_of(name: str) -> str | None:
    """Return the decoder block of a tensor or module by its name, e.g. "model.layers.3"; None if it is in none."""
    block = _BLOCK_OF.match(name)
    return block and block[1]


def layer_configs(config: PretrainedConfig) -> list[Any]:
    """Return one configuration per decoder block, the model's own if all blocks have the same sizes."""
    per_layer = getattr(config, "per_layer_config", None)  # older versions of transformers do not have it
    return [config if per_layer is None else per_layer[index] for index in range(config.num_hidden_layers)]


def head_dims(config: PretrainedConfig) -> list[int]:
    """Return the dimension of an attention head in each layer."""
    by_default = config.hidden_size // config.num_attention_heads
    return [getattr(layer, "head_dim", None) or by_default for layer in layer_configs(config)]


def attention_windows(config: PretrainedConfig) -> list[int | None]:
    """Return the sliding window of each decoder block: the number of last tokens to which a token attends, itself
    included; None for a block without a window, 0 for one with a recurrent state."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return [window] * config.num_hidden_layers
    widths = {"full_attention": None, "linear_attention": 0}
    return [widths.get(kind, window) for kind in kinds]


def num_recurrent_layers(config: PretrainedConfig) -> int:
    """Count the decoder blocks that keep a recurrent state instead of the keys and values of all tokens."""
    return sum(kind == "linear_attention" for kind in getattr(config, "layer_types", None) or ())
