"""The supported model families, described in one table.

A family is a ``model_type`` of transformers. The rest of the code asks its description and never its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linears of a block, as most families name them."""


@dataclass(frozen=True)
class Family:
    """What quantisation, adapters, noise and memory planning need to know of a family's decoder blocks.

    Names of linears and norms are attributes, without the block's prefix.
    """

    projections: tuple[str, ...] = PROJECTIONS
    """Linears that LoRA may adapt."""
    fused: tuple[tuple[str, ...], ...] = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
    """Linears that engines fuse into one matrix, which has one tensor scale in NVFP4."""
    last_linear: str = "down_proj"
    """Linear whose result is read by the residual sum alone."""
    noise_norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    """Norms that AQN adds noise to, and that ``train_norms`` trains."""
    scale_sources: tuple[tuple[tuple[str, ...], str], ...] = (
        (("self_attn.o_proj",), "self_attn.v_proj"),
        (("mlp.down_proj",), "mlp.up_proj"),
        (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "input_layernorm"),
        (("mlp.gate_proj", "mlp.up_proj"), "post_attention_layernorm"),
    )
    """Linears that share an input, and the module whose output channels AWQ divides by their input scales. A linear
    comes before the norms, because it is itself quantised under the scales that its norm takes."""


FAMILIES: Mapping[str, Family] = {
    "qwen2": Family(),
    "qwen3": Family(),
    "llama": Family(),
}


def family_of(model_type: object, *, path: object) -> Family:
    """Look up the description of a family.

    Args:
        model_type: as in config.json.
        path: of the checkpoint, for the message.

    Raises:
        ValueError: the family is not supported.
    """
    if model_type not in FAMILIES:
        raise ValueError(f"{path} is a {model_type!r} model; expected one of {', '.join(FAMILIES)}")
    return FAMILIES[str(model_type)]
