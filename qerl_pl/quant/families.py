"""Check config.json of a checkpoint: whether the model's family is supported, whether the values that training depends
on are possible, and whether trainer and vLLM compute the same function with them.

transformers ignores a key that its configuration class for the family does not have. vLLM has one implementation for
several families and reads some keys for all of them. Keys on which only one of the two libraries would act, and values
that only one of them supports, are therefore refused: otherwise trainer and engine would compute different models.
"""

import inspect
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from transformers import CONFIG_MAPPING

from qerl_pl.model.family import FAMILIES, Experts, family_of
from qerl_pl.model.files import CONFIG, model_config, read_json

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "moe_intermediate_size")
NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
SIZES = (*NEEDED, "num_key_value_heads", "head_dim", "max_position_embeddings")
MOST = 2000
"""Largest accepted number of blocks, and of experts in a block, because a model with a million of them would be built
for minutes before its weights are found to be missing."""
WORDS = (
    "tie_word_embeddings", "use_sliding_window", "attention_bias", "mlp_bias", "norm_topk_prob", "use_qk_norm",
)  # fmt: skip
"""Keys whose value must be true or false; any other value, such as the text "false", would count as true."""
POSITIVE = (
    "rms_norm_eps", "rope_theta", "logits_scaling", "attention_multiplier", "residual_multiplier",
    "embedding_multiplier", "query_pre_attn_scalar", "final_logit_softcapping", "routed_scaling_factor",
    "original_max_position_embeddings", "partial_rotary_factor",
)  # fmt: skip
"""Names of numbers that have to be finite and above 0."""
HIGHEST_EPS = 0.1
"""Largest accepted rms_norm_eps; published models have 1e-6 or 1e-5."""
ONLY_IN_VLLM = (
    "layer_types", "sliding_window", "attention_bias", "bias", "qkv_bias", "mlp_bias", "attention_sinks",
    "layer_rope_theta", "attn_logit_softcapping", "final_logit_softcapping", "logit_scale", "logits_scaling",
    "llama_4_scaling", "dual_chunk_attention_config", "target_layer_count",
)  # fmt: skip
"""Keys of config.json on which vLLM acts even if the family's configuration class in transformers does not have them. A
checkpoint of such a family that has one of these keys is refused, because transformers would ignore the key."""
ACTIVATIONS = {"hidden_act": ("silu", "swish"), "hidden_activation": ("gelu_pytorch_tanh",)}
"""Activation functions of the MLP that vLLM supports, by the key of config.json that names them."""
LAYERS = ("full_attention", "sliding_attention", "linear_attention")
ROPES = ("default", "linear", "yarn", "llama3", "longrope", "su", "proportional")
"""Types of rotary embedding that transformers and vLLM compute in the same way."""
LONGROPE = ("longrope", "su")
"""Names of the rotary embedding LongRoPE; early Phi-3 checkpoints call it "su"."""
ORIGINAL = "original_max_position_embeddings"
"""Key of config.json with the length, in tokens, of the longest sequence for which LongRoPE uses its short factors."""
LONGROPE_FACTORS = ("attention_factor", "short_mscale", "long_mscale")
"""Keys of LongRoPE with factors of cosines and sines: transformers reads only the first, and vLLM only the others."""
PARTS_OF_HEADS = ("partial_rotary_factor", "rotary_pct", "rotary_emb_fraction")
"""Keys under which vLLM reads which part of each head rotary embeddings turn; transformers reads only the first."""
ROPE_FACTORS = ("low_freq_factor", "high_freq_factor")
ROPE_NUMBERS = (
    "rope_theta", "factor", ORIGINAL, *ROPE_FACTORS, "attention_factor", "beta_fast", "beta_slow",
    "partial_rotary_factor",
)  # fmt: skip
"""Numbers of a rotary embedding that have to be finite and above 0."""


def check_family(path: str | Path) -> Mapping:
    """Check, from config.json alone, that the model in a checkpoint folder can be trained; raise ValueError with a
    message of one line if not. Returns the configuration; for a vision-language model, that of its language model."""
    file = Path(path) / CONFIG
    if not file.is_file():
        raise ValueError(f"{path} has no {CONFIG}; expected a Hugging Face checkpoint folder")
    config = model_config(file.parent)
    name = config.get("model_type")
    names = FAMILIES[str(name)].experts if name in FAMILIES else None
    if has_experts(config) and names is None:
        raise ValueError(
            f"{path} is a mixture of experts ({name!r}), which is not supported; expected one of {', '.join(FAMILIES)}"
        )
    family = family_of(name, path=path)
    for key in family.needed:
        if config.get(key) is None:
            raise ValueError(f"{file} has no {key}, which vLLM needs; take the file from the model's original folder")
    for key, words in family.refused:
        if config.get(key):
            raise ValueError(f"{path}: {key} is {config[key]!r}; {name} models with {words} are not supported")
    _check_values(file, config)
    if names is not None:
        _check_experts(file, config, names)
    _check_keys(file, config)
    _check_layers(file, config)
    for place, rope in (("rope_parameters", {}), *_ropes(file, config)):
        _check_rope(file, place, rope)
        _check_same_rope(file, place, rope, config)
    if family.one_window:
        _check_windows(file, config)
    return config


def has_experts(config: Mapping) -> bool:
    """Return whether a config.json, or a nested config such as ``text_config``, describes a mixture of experts."""
    nested = (value for value in config.values() if isinstance(value, Mapping))
    named = "moe" in str(config.get("model_type")) or any(config.get(name) for name in EXPERTS)
    return named or any(map(has_experts, nested))


def check_positions(positions: int | None, short: int | None, *, longest: int) -> None:
    """Check that the longest prompt and completion together, ``longest`` tokens, do not exceed ``positions``, the
    model's limit on the length of a sequence (None: none is known), and that trainer and vLLM use the same rotary
    embedding for every sequence; raise ValueError if not.

    With LongRoPE, transformers chooses between short and long factors by the longest row of a forward pass, so one long
    row would change the rows that are packed with it, whereas vLLM chooses once, by ``max_model_len``. Both use the
    short factors if no sequence is longer than ``short`` tokens (from ``longest_with_short_factors``), so a larger
    ``longest`` is refused.
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


def check_length(config: Mapping, *, longest: int) -> None:
    """Check the longest prompt and completion as ``check_positions`` does, for the model of a config.json."""
    check_positions(config.get("max_position_embeddings"), longest_with_short_factors(config), longest=longest)


def longest_with_short_factors(config: Mapping) -> int | None:
    """Return the length, in tokens, of the longest sequence for which LongRoPE uses its short factors. Returns None for
    other rotary embeddings, and if config.json does not give this length, in which case transformers never uses the
    long factors."""
    ropes = [config[name] for name in ("rope_parameters", "rope_scaling") if isinstance(config.get(name), Mapping)]
    ropes += [part for rope in ropes for part in rope.values() if isinstance(part, Mapping)]  # one per kind of layer
    scaled = [rope for rope in ropes if (rope.get("rope_type") or rope.get("type")) in LONGROPE]
    limits = [where[ORIGINAL] for where in (config, *scaled) if type(where.get(ORIGINAL)) is int]
    return min(limits, default=None) if scaled else None


def _known(config: Mapping) -> Mapping[str, object]:
    """Return the parameters, by name, of transformers' configuration class for a model's family."""
    return inspect.signature(CONFIG_MAPPING[config["model_type"]].__init__).parameters


def _check_values(file: Path, config: Mapping) -> None:
    for name in SIZES:
        value = config.get(name)
        if value is None and name in NEEDED and name in _known(config):
            raise ValueError(f"{file} has no {name}; take the file from the model's original folder")
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{file}: {name} is {value!r}; expected a whole number above 0")
    _check_number_of(file, "num_hidden_layers", config["num_hidden_layers"])
    for name in WORDS:
        if not isinstance(config.get(name), bool | None):
            raise ValueError(f"{file}: {name} is {config[name]!r}; expected true or false")
    for name in POSITIVE:
        _check_number(file, name, config.get(name))
    if (config.get("rms_norm_eps") or 0) > HIGHEST_EPS:
        raise ValueError(f"{file}: rms_norm_eps is {config['rms_norm_eps']}; expected at most {HIGHEST_EPS}")
    heads, groups, hidden = config["num_attention_heads"], config.get("num_key_value_heads"), config["hidden_size"]
    if groups and heads % groups:
        raise ValueError(f"{file}: num_attention_heads {heads} is no multiple of num_key_value_heads {groups}")
    if not config.get("head_dim") and hidden % heads:
        raise ValueError(f"{file}: hidden_size {hidden} is no multiple of num_attention_heads {heads}")
    if (head := config.get("head_dim") or hidden // heads) % 2:
        raise ValueError(f"{file}: a head has {head} dimensions; rotary embeddings need an even number")
    _check_ends(file, config, config["vocab_size"])
    generation = file.with_name("generation_config.json")
    if generation.is_file():
        _check_ends(generation, read_json(generation), config["vocab_size"])


def _check_number_of(file: Path, name: str, value: int) -> None:
    if value > MOST:
        raise ValueError(f"{file}: {name} is {value}; expected at most {MOST}")


def _check_experts(file: Path, config: Mapping, names: Experts) -> None:
    other = CONFIG_MAPPING[config["model_type"]].attribute_map  # other keys that transformers may use for a name
    needed = (names.number, names.chosen, names.inner, *filter(None, (names.shared, names.shared_number)))
    sizes = {name: config.get(name, config.get(other.get(name))) for name in needed}
    for name, value in sizes.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"{file}: {name} is {value!r}; expected a whole number above 0")
    _check_number_of(file, names.number, sizes[names.number])
    if config.get(names.normalised) is False and names.normalised not in _known(config):
        raise ValueError(
            f"{file}: {names.normalised} is false, which transformers ignores for {config['model_type']} and vLLM does "
            "not; remove the key"
        )
    if sizes[names.chosen] > sizes[names.number]:
        raise ValueError(f"{file}: {names.chosen} is {sizes[names.chosen]} and there are {sizes[names.number]} experts")
    for name in names.groups:
        if config.get(name, 1) != 1:
            raise ValueError(
                f"{file}: {name} is {config[name]!r}; expected 1, because routers that choose groups of experts first "
                "are not supported"
            )
    blocks, first = config["num_hidden_layers"], config.get(names.dense_blocks) if names.dense_blocks else 0
    if type(first) is not int or not 0 <= first < blocks:
        raise ValueError(
            f"{file}: {names.dense_blocks} is {first!r}; expected a whole number of blocks without experts, from 0 to "
            f"{blocks - 1}, because the last of {blocks} blocks (num_hidden_layers) has to have experts"
        )


def _check_number(file: Path, name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{file}: {name} is {repr(value)[:80]}; expected a finite number above 0")


def _check_ends(file: Path, config: Mapping, vocab_size: int) -> None:
    ends = config.get("eos_token_id")
    tokens = [token for token in (ends if isinstance(ends, list) else [ends]) if token is not None]
    # An end token above the vocabulary is only in the tokenizer. It does no harm if the model knows another end token.
    known = [token for token in tokens if type(token) is int and 0 <= token < vocab_size]
    for token in tokens:
        if type(token) is not int or token < 0 or not known:
            raise ValueError(f"{file}: eos_token_id is {ends!r}; expected tokens from 0 to {vocab_size - 1}")


def _check_keys(file: Path, config: Mapping) -> None:
    family = str(config["model_type"])
    known = _known(config)
    for name in ONLY_IN_VLLM:
        if config.get(name) and name not in known:
            raise ValueError(
                f"{file}: {name} is {repr(config[name])[:80]}, which transformers ignores for {family} and vLLM does "
                "not; remove the key if the model was trained without it"
            )
    backwards = "a language model that generates text attends backwards only"
    if config.get("is_causal") is False:
        raise ValueError(f"{file}: is_causal is false; {backwards}")
    if (both := config.get("use_bidirectional_attention")) and both != "vision":  # "vision" is that of image tokens
        raise ValueError(f"{file}: use_bidirectional_attention is {both!r}; {backwards}")
    name = "hidden_activation" if family.startswith("gemma") else "hidden_act"
    if config.get(name) not in (None, *ACTIVATIONS[name]):
        raise ValueError(
            f"{file}: {name} is {config[name]!r}, which vLLM does not have; expected {ACTIVATIONS[name][0]!r}"
        )


def _check_layers(file: Path, config: Mapping) -> None:
    window, kinds, blocks = config.get("sliding_window"), config.get("layer_types"), config["num_hidden_layers"]
    if window is not None and (type(window) is not int or window < 1):
        raise ValueError(f"{file}: sliding_window is {window!r}; expected a number of tokens above 0, or null for none")
    if kinds is None:
        return
    if not isinstance(kinds, list) or len(kinds) != blocks:
        raise ValueError(
            f"{file}: layer_types is {repr(kinds)[:80]}; expected a kind for each of {blocks} blocks "
            "(num_hidden_layers), or null"
        )
    for kind in kinds:
        if kind not in LAYERS:
            raise ValueError(f"{file}: layer_types has {repr(kind)[:80]}; expected {', '.join(LAYERS)}")
    if "sliding_attention" in kinds and window is None and "sliding_window" in config:
        raise ValueError(f"{file}: layer_types has sliding_attention and sliding_window is null; give its length")


def _check_windows(file: Path, config: Mapping) -> None:
    """Raise ValueError if some decoder blocks have a sliding attention window and others have none. This is called only
    for model families for which vLLM cannot compute such a mixture. If config.json has no layer_types, the blocks with
    a window are those to which transformers' Qwen2Config gives one."""
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


def _ropes(file: Path, config: Mapping) -> Iterator[tuple[str, Mapping]]:
    """Yield the settings of a model's rotary embeddings, each with the key of config.json under which they are: one
    pair, or one per kind of layer if kinds of layers have different settings."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name)
        if not isinstance(rope, Mapping | None):
            raise ValueError(f"{file}: {name} is {repr(rope)[:80]}; expected a mapping, or null")
        parts = {f"{name}.{kind}": part for kind, part in (rope or {}).items() if kind in LAYERS} or {name: rope}
        for place, part in parts.items():
            if not isinstance(part, Mapping | None):
                raise ValueError(f"{file}: {place} is {repr(part)[:80]}; expected a mapping, or null")
            if part is not None:
                yield place, part


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
    for name in ROPE_NUMBERS:
        _check_number(file, f"{place}.{name}", rope.get(name))
    if kind in ("linear", "yarn", "llama3") and rope.get("factor") is None:
        raise ValueError(f"{file}: {place} is of the kind {kind!r} and has no factor; take it from the original model")
    for name in ROPE_FACTORS if kind == "llama3" else ():
        if rope.get(name) is None:
            raise ValueError(f"{file}: {place} is of the kind 'llama3' and has no {name}; take it from the original")


def _check_same_rope(file: Path, place: str, rope: Mapping, config: Mapping) -> None:
    """Raise ValueError if transformers and vLLM would compute different rotary embeddings from the settings ``rope``,
    which config.json has under the key ``place``, because only one of them acts on a key."""
    kind, partial = rope.get("rope_type") or rope.get("type"), PARTS_OF_HEADS[0]
    for name in PARTS_OF_HEADS:
        value = rope.get(name, config.get(name))
        acts = name == partial and (kind == "proportional" or FAMILIES[config["model_type"]].partial_rotary)
        if value not in (None, 1) and not acts:
            raise ValueError(
                f"{file}: {name} is {value!r}, which transformers ignores for {config['model_type']} and vLLM does "
                "not; remove the key if the model was trained without it"
            )
    if kind not in LONGROPE:
        return
    for name in LONGROPE_FACTORS:
        if rope.get(name) is not None:
            raise ValueError(
                f"{file}: {place}.{name} is {rope[name]!r}, on which only one of transformers and vLLM acts"
            )
    original, positions, factor = config.get(ORIGINAL) or rope.get(ORIGINAL), config.get(SIZES[-1]), rope.get("factor")
    if factor is not None and (not original or not positions or factor != positions / original):
        raise ValueError(
            f"{file}: {place}.factor is {factor!r}, which vLLM ignores; expected {SIZES[-1]} / {ORIGINAL}, or no factor"
        )
