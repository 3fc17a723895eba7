"""Read the text model of a checkpoint that also has a vision part: its configuration and the names of its tensors.

On text, the model of such a checkpoint (``WITH_VISION``) computes exactly what its text model computes alone. The text
model is therefore used as a base of the text model's family, and the weights of the vision part are not read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

WITH_VISION = {"gemma3": "gemma3_text", "gemma4": "gemma4_text", "mistral3": "mistral", "qwen3_5": "qwen3_5_text"}
"""Maps the ``model_type`` of checkpoints with a vision part, whose config.json has the text model's configuration as
``text_config``, to the text model's ``model_type``, for configurations that leave the latter out."""
PREFIXES = {
    "language_model.model.": "model.",  # written by transformers 4, and found in the hub's checkpoints
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "lm_head.": "lm_head.",
}
"""Maps prefixes of the text model's tensors in a checkpoint with a vision part to their prefixes in a checkpoint of the
text model alone."""
NOT_USED = "its vision part is not used"
HEAD = "lm_head.weight"
_OF_THE_WHOLE = ("eos_token_id", "bos_token_id", "pad_token_id", "dtype", "torch_dtype", "tie_word_embeddings")


def has_vision(config: Mapping) -> bool:
    """Return whether a config.json describes a text model with a vision part that can be left out."""
    return config.get("model_type") in WITH_VISION and isinstance(config.get("text_config"), Mapping)


def text_name(name: str) -> str | None:
    """Return the name that a tensor of a checkpoint with a vision part has in the text model alone; None for tensors of
    the vision part."""
    for stored, plain in PREFIXES.items():
        if name.startswith(stored):
            return plain + name.removeprefix(stored)
    return None


def text_config(config: Mapping, *, has_head: bool | None = None) -> dict[str, Any]:
    """Return the config.json that the text model would have alone, including the values that the checkpoint's
    config.json leaves out because they are defaults.

    Args:
        config: config.json of the whole checkpoint, see ``has_vision``.
        has_head: whether the checkpoint stores a language-model head, which is then not tied to the embedding; None:
            not known.

    Raises:
        ValueError: the text model's family is not known, or the configuration class of transformers refuses a value.
    """
    given = {**config["text_config"], **{name: config[name] for name in _OF_THE_WHOLE if name in config}}
    family = given.pop("model_type", WITH_VISION[config["model_type"]])
    if family not in CONFIG_MAPPING or family not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(f"text_config of a {config['model_type']!r} model has model_type {family!r}, not a text model")
    if has_head is not None:
        given["tie_word_embeddings"] = not has_head
    text = json.loads(CONFIG_MAPPING[family].from_dict(given).to_json_string(use_diff=False))
    return {**text, "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]]}
