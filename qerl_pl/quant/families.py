"""Check config.json of a checkpoint: whether the model's family is supported, and whether values that training depends
on are possible."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from qerl_pl.model.family import FAMILIES, family_of
from qerl_pl.model.files import CONFIG, model_config, read_json
from qerl_pl.quant.alike import check_computed_alike

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "moe_intermediate_size")
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
POSITIVE = ("rms_norm_eps", "rope_theta")
HIGHEST_EPS = 0.1
"""Largest accepted rms_norm_eps; published models have 1e-6 or 1e-5."""
LONGROPE = ("longrope", "su")
"""Names of the rope type LongRoPE; "su" is that of early Phi-3 checkpoints."""
ORIGINAL = "original_max_position_embeddings"
"""Name in config.json of the longest sequence, in tokens, with which LongRoPE uses its short factors."""


def check_family(path: str | Path) -> Mapping:
    """Read config.json of a checkpoint folder, and refuse models that cannot be trained.

    Returns:
        The content of config.json; for a checkpoint with a vision part, the configuration of its text model.

    Raises:
        ValueError: the family is not supported, the model is a mixture of experts, or a value is impossible; the
            message is one line.
    """
    file = Path(path) / CONFIG
    if not file.is_file():
        raise ValueError(f"{path} has no {CONFIG}; expected a Hugging Face checkpoint folder")
    config = model_config(file.parent)
    family = config.get("model_type")
    if has_experts(config):
        raise ValueError(
            f"{path} is a mixture of experts ({family!r}), which is not supported; expected a dense model of "
            f"{', '.join(FAMILIES)}"
        )
    for name, words in family_of(family, path=path).refused:
        if config.get(name):
            raise ValueError(f"{path}: {name} is {config[name]!r}; {family} models with {words} are not supported")
    _check_values(file, config)
    check_computed_alike(file, config)
    if family_of(family, path=path).one_window:
        _check_windows(file, config)
    return config


def has_experts(config: Mapping) -> bool:
    """Return whether a config.json describes a mixture of experts, also in a nested text model of a vision model."""
    nested = (value for value in config.values() if isinstance(value, Mapping))
    return (
        any(config.get(name) for name in EXPERTS)
        or "moe" in str(config.get("model_type"))
        or any(has_experts(value) for value in nested)
    )


def check_positions(positions: int | None, short: int | None, *, longest: int) -> None:
    """Check that a model has enough positions for the longest prompt and completion, and that trainer and vLLM give
    every sequence the same positions.

    A model with LongRoPE has short and long factors of the rotary embedding. transformers chooses between them by the
    longest row of a forward pass, so that one long row would change all rows that are packed with it. vLLM chooses once
    by ``max_model_len``, which is ``longest``. Both use the short factors if no sequence is longer than
    original_max_position_embeddings.

    Args:
        positions: the model's number of positions; None if config.json does not say.
        short: see ``longest_with_short_factors``.
        longest: tokens of the longest prompt and completion together.

    Raises:
        ValueError: ``longest`` is larger than the model's number of positions, or than the number up to which LongRoPE
            uses its short factors.
    """
    if positions is not None and longest > positions:
        raise ValueError(
            f"prompts and completions may reach {longest} tokens and the model has {positions} positions; lower "
            "data.max_prompt_tokens or model.sampling.max_tokens"
        )
    if short is not None and longest > short:
        raise ValueError(
            f"prompts and completions may reach {longest} tokens; expected at most {short} ({ORIGINAL}), because "
            "the model has LongRoPE, whose factors for longer sequences trainer and vLLM would use for different "
            "sequences; lower data.max_prompt_tokens or model.sampling.max_tokens (and model.val_sampling.max_tokens, "
            f"if set) so that together they are at most {short}"
        )


def longest_with_short_factors(config: Mapping) -> int | None:
    """Return the tokens of the longest sequence with which LongRoPE uses its short factors; None if the model does not
    have LongRoPE, or if config.json has no such number, so that transformers never uses the long factors."""
    ropes = [config[name] for name in ("rope_parameters", "rope_scaling") if isinstance(config.get(name), Mapping)]
    ropes += [part for rope in ropes for part in rope.values() if isinstance(part, Mapping)]  # one per kind of layer
    scaled = [rope for rope in ropes if (rope.get("rope_type") or rope.get("type")) in LONGROPE]
    limits = [where[ORIGINAL] for where in (config, *scaled) if type(where.get(ORIGINAL)) is int]
    return min(limits, default=None) if scaled else None


def _check_values(file: Path, config: Mapping) -> None:
    for name in SIZES:
        value = config.get(name)
        if value is None and name in NEEDED:
            raise ValueError(f"{file} has no {name}; take the file from the model's original folder")
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{file}: {name} is {value!r}; expected a whole number above 0")
    for name in POSITIVE:
        value = config.get(name)
        if value is not None and not (_is_number(value) and 0 < value < math.inf):
            raise ValueError(f"{file}: {name} is {value!r}; expected a finite number above 0")
    if config.get("rms_norm_eps", 0) > HIGHEST_EPS:
        raise ValueError(f"{file}: rms_norm_eps is {config['rms_norm_eps']}; expected at most {HIGHEST_EPS}, as 1e-6")
    heads, groups, hidden = config["num_attention_heads"], config.get("num_key_value_heads"), config["hidden_size"]
    if groups and heads % groups:
        raise ValueError(f"{file}: num_attention_heads {heads} is no multiple of num_key_value_heads {groups}")
    if not config.get("head_dim") and hidden % heads:
        raise ValueError(f"{file}: hidden_size {hidden} is no multiple of num_attention_heads {heads}")
    _check_ends(file, config, config["vocab_size"])
    generation = file.with_name("generation_config.json")
    if generation.is_file():
        _check_ends(generation, read_json(generation), config["vocab_size"])


def _check_windows(file: Path, config: Mapping) -> None:
    """Refuse a sliding window in some blocks only, by the rule of transformers' Qwen2Config."""
    blocks, kinds = config["num_hidden_layers"], config.get("layer_types")
    if not isinstance(kinds, list):
        first = config.get("max_window_layers", 28) if config.get("use_sliding_window") else blocks
        with_window = max(0, blocks - first) if config.get("sliding_window", 4096) is not None else 0
    else:
        with_window = sum(kind == "sliding_attention" for kind in kinds)
    if 0 < with_window < blocks:
        raise ValueError(
            f"{file} gives {with_window} of {blocks} blocks a sliding window (use_sliding_window, max_window_layers, "
            "layer_types), which vLLM does not compute for this family; set use_sliding_window to false and remove "
            "layer_types if sequences are shorter than sliding_window"
        )


def _check_ends(file: Path, config: Mapping, vocab_size: int) -> None:
    ends = config.get("eos_token_id")
    tokens = [token for token in (ends if isinstance(ends, list) else [ends]) if token is not None]
    # A further end token may have been added to the tokenizer alone; the model then ends with one of the others.
    known = [token for token in tokens if type(token) is int and 0 <= token < vocab_size]
    for token in tokens:
        if type(token) is not int or token < 0 or not known:
            raise ValueError(f"{file}: eos_token_id is {ends!r}; expected tokens from 0 to {vocab_size - 1}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
