"""Refuse values of config.json with which vLLM would not start, or would compute another function than the trainer.

transformers ignores a key that its configuration class for the family does not have, while vLLM reads some keys of
every model that its file for the architecture serves. So a key that only one of the two reads is refused, and so are
values that only one of them supports.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from transformers import CONFIG_MAPPING

ONLY_IN_VLLM = (
    "layer_types",
    "sliding_window",
    "attention_bias",
    "bias",
    "qkv_bias",
    "mlp_bias",
    "attention_sinks",
    "layer_rope_theta",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "logits_scaling",
    "llama_4_scaling",
    "dual_chunk_attention_config",
    "target_layer_count",
)
"""Names in config.json that vLLM reads for every model of some architectures; where the family's configuration class in
transformers lacks one, only vLLM would act on it."""
WORDS = ("tie_word_embeddings", "use_sliding_window", "attention_bias", "mlp_bias")
"""Names of values that are true or false; any other value, such as the text "false", would be taken as true."""
FACTORS = (
    "logits_scaling",
    "attention_multiplier",
    "residual_multiplier",
    "embedding_multiplier",
    "query_pre_attn_scalar",
    "final_logit_softcapping",
)
"""Names of factors and divisors of activations, which have to be finite and above 0."""
ACTIVATIONS = {"hidden_act": ("silu", "swish"), "hidden_activation": ("gelu_pytorch_tanh",)}
"""Activations of the MLP that vLLM has, by the name under which config.json gives them."""
LAYERS = ("full_attention", "sliding_attention", "linear_attention")
ROPES = ("default", "linear", "yarn", "llama3", "longrope", "su", "proportional")
"""Kinds of rotary embedding that trainer and vLLM compute alike."""
NUMBERS = (
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "partial_rotary_factor",
)
"""Numbers of a rotary embedding that have to be finite and above 0."""


def check_computed_alike(file: Path, config: Mapping) -> None:
    """Check the values of a config.json that decide what is computed.

    Args:
        file: config.json, for messages.
        config: its content, or that of its text model; the family is supported.

    Raises:
        ValueError: names the value, in one line.
    """
    for name in WORDS:
        if not isinstance(config.get(name), bool | None):
            raise ValueError(f"{file}: {name} is {config[name]!r}; expected true or false")
    for name in FACTORS:
        _check_number(file, name, config.get(name))
    _check_keys(file, config)
    _check_activation(file, config)
    _check_layers(file, config)
    for place, rope in _ropes(file, config):
        _check_rope(file, place, rope)


def _check_keys(file: Path, config: Mapping) -> None:
    family = str(config["model_type"])
    known = inspect.signature(CONFIG_MAPPING[family].__init__).parameters
    for name in ONLY_IN_VLLM:
        if config.get(name) and name not in known:
            raise ValueError(
                f"{file}: {name} is {repr(config[name])[:80]}, which transformers ignores for {family} and vLLM does "
                "not; remove it, if the model was trained without"
            )
    if config.get("is_causal") is False:
        raise ValueError(f"{file}: is_causal is false; a language model that generates text attends backwards only")
    if (both := config.get("use_bidirectional_attention")) and both != "vision":  # "vision" is that of image tokens
        raise ValueError(
            f"{file}: use_bidirectional_attention is {both!r}; a language model that generates text attends backwards "
            "only"
        )


def _check_activation(file: Path, config: Mapping) -> None:
    name = "hidden_activation" if str(config["model_type"]).startswith("gemma") else "hidden_act"
    if (given := config.get(name)) is not None and given not in ACTIVATIONS[name]:
        raise ValueError(f"{file}: {name} is {given!r}, which vLLM does not have; expected {ACTIVATIONS[name][0]!r}")


def _check_layers(file: Path, config: Mapping) -> None:
    window, kinds, blocks = config.get("sliding_window"), config.get("layer_types"), config["num_hidden_layers"]
    if window is not None and (type(window) is not int or window < 1):
        raise ValueError(f"{file}: sliding_window is {window!r}; expected a number of tokens above 0, or null for none")
    if (head := config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]) % 2:
        raise ValueError(f"{file}: a head has {head} dimensions; rotary embeddings turn pairs, so expected an even one")
    if kinds is None:
        return
    if not isinstance(kinds, list) or len(kinds) != blocks:
        raise ValueError(
            f"{file}: layer_types is {repr(kinds)[:80]}; expected a kind for each of {blocks} blocks "
            "(num_hidden_layers), or null"
        )
    if strange := [kind for kind in kinds if kind not in LAYERS]:
        raise ValueError(f"{file}: layer_types has {repr(strange[0])[:80]}; expected {', '.join(LAYERS)}")
    if "sliding_attention" in kinds and window is None and "sliding_window" in config:
        raise ValueError(f"{file}: layer_types has sliding_attention and sliding_window is null; give its tokens")


def _ropes(file: Path, config: Mapping) -> Iterator[tuple[str, Mapping]]:
    """Yield the settings of rotary embeddings with their place: of the model, or one per kind of layer."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name)
        if rope is None:
            continue
        if not isinstance(rope, Mapping):
            raise ValueError(f"{file}: {name} is {repr(rope)[:80]}; expected a mapping, or null")
        parts = {kind: part for kind, part in rope.items() if kind in LAYERS}
        for kind, part in parts.items():
            if not isinstance(part, Mapping | None):
                raise ValueError(f"{file}: {name}.{kind} is {repr(part)[:80]}; expected a mapping, or null")
            if part is not None:
                yield f"{name}.{kind}", part
        if not parts:
            yield name, rope


def _check_rope(file: Path, place: str, rope: Mapping) -> None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "dynamic":
        raise ValueError(
            f"{file}: {place} is of the kind 'dynamic', which transformers computes from the longest row of a batch "
            "and vLLM once for all rows; expected another kind, or none if sequences are short enough"
        )
    if kind == "mrope" and "mrope_section" in rope:  # the old name of "default" with sections
        kind = "default"
    if kind not in ROPES:
        raise ValueError(f"{file}: {place} is of the kind {repr(kind)[:80]}; expected one of {', '.join(ROPES)}")
    for name in NUMBERS:
        _check_number(file, f"{place}.{name}", rope.get(name))
    if kind in ("linear", "yarn", "llama3") and rope.get("factor") is None:
        raise ValueError(f"{file}: {place} is of the kind {kind!r} and has no factor; take it from the original model")
    for name in ("low_freq_factor", "high_freq_factor") if kind == "llama3" else ():
        if rope.get(name) is None:
            raise ValueError(f"{file}: {place} is of the kind 'llama3' and has no {name}; take it from the original")


def _check_number(file: Path, name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{file}: {name} is {repr(value)[:80]}; expected a finite number above 0")
