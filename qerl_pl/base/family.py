"""Table of the supported model families.

A family is a ``model_type`` of transformers. Other modules read a family's description and never test its name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Names of a block's linears in most families."""
MERGED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Linears that some families store as one matrix, with the names of its parts in the other families."""
Elementwise = Literal["norms", "mlp", "attention"]


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
    elementwise: frozenset[Elementwise] = frozenset({"norms", "mlp", "attention"})
    """Parts of a block that compute exactly what ``policy.elementwise`` computes in their place."""
    logit_divisor: str | None = None
    """Name in config.json of the number by which the model divides its logits; None: it does not."""
    logit_cap: str | None = None
    """Name in config.json of the number c of the soft cap c tanh(logits / c), which may be null; None: none."""
    keys_as_values: bool = False
    """Whether blocks without v_proj use the output of k_proj, adapter included, as values before their own norms."""
    refused: tuple[tuple[str, str], ...] = ()
    """Names in config.json of values that must be null, false or 0, each with the words for what is not supported."""

    def targets(self, names: Collection[str]) -> tuple[str, ...]:
        """LoRA targets by the names that this family has: all parts of a merged linear stand for it.

        Raises:
            ValueError: some parts of a merged linear are named, and others are not.
        """
        found = list(names)
        for merged, parts in MERGED.items():
            if merged not in self.projections:
                continue
            given = [part for part in parts if part in found]
            if given and len(given) < len(parts):
                raise ValueError(
                    f"lora targets name {given}, which are a part of {merged} in this model; name {merged}, or none of "
                    f"{', '.join(parts)}"
                )
            if given:
                found = [merged, *(name for name in found if name not in parts and name != merged)]
        return tuple(found)


_GATED = (("self_attn.o_proj",), "self_attn.v_proj"), (("mlp.down_proj",), "mlp.up_proj")
# Norms after a sublayer scale what is added to the residual stream; no linear reads their output.
_NORMS_AFTER = Family(
    noise_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    scale_sources=_GATED,
    elementwise=frozenset({"mlp"}),
)
# Gemma stores norm weights minus 1, so that AWQ cannot divide them, and has norms before and after each sublayer.
_GEMMA = Family(
    noise_norms=("input_layernorm", "pre_feedforward_layernorm"),
    scale_sources=_GATED,
    elementwise=frozenset(),
    logit_cap="final_logit_softcapping",
)
# Gemma 4 normalises values, so that o_proj's input has no linear before it into which scales can be folded.
_GEMMA4 = replace(
    _GEMMA,
    scale_sources=(
        (("mlp.down_proj",), "mlp.up_proj"),
        (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "input_layernorm"),
        (("mlp.gate_proj", "mlp.up_proj"), "pre_feedforward_layernorm"),
    ),
    keys_as_values=True,
    refused=(
        ("hidden_size_per_layer_input", "embeddings per layer (E2B, E4B)"),
        ("num_kv_shared_layers", "layers that share keys and values (E2B, E4B)"),
    ),
)
_MERGED = Family(
    projections=("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    scale_sources=(
        (("self_attn.qkv_proj",), "input_layernorm"),
        (("mlp.gate_up_proj",), "post_attention_layernorm"),
    ),
    elementwise=frozenset({"norms"}),
)
_OWN_ATTENTION = Family(elementwise=frozenset({"norms", "mlp"}))

FAMILIES: Mapping[str, Family] = {
    "qwen2": Family(),
    "qwen3": Family(),
    "llama": Family(),
    "mistral": Family(),
    "ministral3": _OWN_ATTENTION,  # scales queries by their position
    "granite": replace(Family(), logit_divisor="logits_scaling"),
    "smollm3": _OWN_ATTENTION,  # rotates in some of its layers only
    "olmo3": _NORMS_AFTER,
    "phi3": _MERGED,  # Phi-3, Phi-3.5 and Phi-4
    "gemma3_text": replace(_GEMMA, refused=(("attn_logit_softcapping", "a soft cap of attention scores"),)),
    "gemma4_text": _GEMMA4,
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


def with_merged(names: Collection[str]) -> tuple[str, ...]:
    """Names of LoRA targets, and of the merged linears that all of their parts stand for, whatever the family is."""
    return (*names, *(merged for merged, parts in MERGED.items() if set(parts) <= set(names)))
