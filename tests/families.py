"""A small configuration of each model family, with everything switched on that distinguishes the family."""

from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig

from qerl_pl.model.family import FAMILIES

WINDOW = 24  # tokens; tests have rows longer and shorter than this
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the smallest that vLLM has on a CPU
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": 5,
    "pad_token_id": None,
}
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16}
OWN: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 2,
        "moe_intermediate_size": 64,
        "routed_scaling_factor": 1.8,
        "first_k_dense_replace": 1,
        "attention_bias": True,
        "use_qk_norm": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5},
    },
    "mistral": {"sliding_window": WINDOW},
    "ministral3": {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}},
    "granite": {
        "logits_scaling": 4.0,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.1,
    },
    "smollm3": {"no_rope_layers": [1, 0]},
    "olmo3": MIXED,
    "gemma3_text": {**MIXED, "query_pre_attn_scalar": 24},
    "gemma4_text": {
        **MIXED,
        "global_head_dim": 64,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 3.0,
    },
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.5,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
    },
}
OWN["qwen3_5_moe_text"] = OWN["qwen3_5_text"] | {
    "intermediate_size": None,
    "initializer_range": 0.05,  # with 0.15, four blocks multiply rounding errors by some hundreds
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 96,
}


VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
}
WHOLE = {
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "mistral": "mistral3",
    "ministral3": "mistral3",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5_moe",
}
"""Text families whose published checkpoints mostly have a vision part -> model_type of the whole checkpoint."""


def with_vision(text: PretrainedConfig) -> PretrainedConfig:
    """Make the configuration of a model with a vision part, as checkpoints of its family are published. ``text`` is the
    configuration of its text part; the model_type of ``text`` has to be a key of ``WHOLE``."""
    kind = WHOLE[text.model_type]
    vision = {**VISION, "patch_size": 14, **({"head_dim": 16} if kind == "mistral3" else {})}
    whole: dict[str, Any] = {"text_config": text.to_dict(), "vision_config": vision, "image_token_index": 60}
    if kind == "gemma4":
        vision |= {"num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 64}
        whole["image_token_id"] = whole.pop("image_token_index")
        whole["text_config"]["pad_token_id"] = 0
    if kind.startswith("qwen3_5"):
        vision |= {"depth": 1, "num_heads": 2, "out_hidden_size": text.hidden_size, "num_position_embeddings": 4}
        whole["image_token_id"] = whole.pop("image_token_index")
        whole |= {"video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}
    whole |= {name: getattr(text, name) for name in ("tie_word_embeddings", "eos_token_id")}
    return CONFIG_MAPPING[kind](**whole)


def tiny_config(family: str, **sizes: Any) -> PretrainedConfig:
    """Make the configuration of a model of a family that is small enough for tests: two blocks, and weights of a few
    hundred kilobytes. ``sizes`` replaces values of the configuration."""
    values = {**SIZES, **OWN.get(family, {}), **sizes}
    if "linear_attention" in values.get("layer_types", ()):  # so in all blocks but the last
        values["layer_types"] = [*["linear_attention"] * (values["num_hidden_layers"] - 1), "full_attention"]
    return CONFIG_MAPPING[family](**values)


NAMES = tuple(FAMILIES)
MIXTURES = tuple(name for name, family in FAMILIES.items() if family.experts)
