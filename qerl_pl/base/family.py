"""Table of the supported model families.

A family is a ``model_type`` of transformers. Other modules read a family's description and never test its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Names of a block's linears in most families."""


@dataclass(frozen=True)
class Family:
    """Description of a family's decoder blocks for quantisation, adapters, noise and memory planning.

    Linears and norms are given by their attribute names, without the block's prefix.
    """

    projections: tuple[str, ...] = PROJECTIONS
    """Linears that LoRA may adapt."""
    fused: tuple[tuple[str, ...], ...] = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
    """Groups of linears that engines fuse into one matrix; in NVFP4 such a matrix has one tensor scale."""
    last_linear: str = "down_proj"
    """Last linear of a block, whose output only the residual sum reads."""
    noise_norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    """Norms that AQN adds noise to, and that ``train_norms`` trains."""
    scale_sources: tuple[tuple[tuple[str, ...], str], ...] = (
        (("self_attn.o_proj",), "self_attn.v_proj"),
        (("mlp.down_proj",), "mlp.up_proj"),
        (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "input_layernorm"),
        (("mlp.gate_proj", "mlp.up_proj"), "post_attention_layernorm"),
    )
    """Groups of linears that share an input, each with the module whose output channels AWQ divides by the scales of
    that input. Groups whose module is a linear come first, so that the linear's weights are final when the scales of
    its own input are searched."""


FAMILIES: Mapping[str, Family] = {
    "qwen2": Family(),
    "qwen3": Family(),
    "llama": Family(),
}


def family_of(model_type: object, *, path: object) -> Family:
    """Look up the description of a family.

    Args:
        model_type: ``model_type`` of config.json.
        path: folder of the checkpoint, for the error message.

    Raises:
        ValueError: the family is not supported.
    """
    if model_type not in FAMILIES:
        raise ValueError(f"{path} is a {model_type!r} model; expected one of {', '.join(FAMILIES)}")
    return FAMILIES[str(model_type)]
