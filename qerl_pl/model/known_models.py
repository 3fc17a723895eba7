"""Dimensions of well-known models, so that the memory of a run can be planned before its model is downloaded."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

_FORMAT = re.compile(r"-(nvfp4|mxfp4|nf4)(?:a16)?$", re.IGNORECASE)


class Sizes(NamedTuple):
    """Values of a model's config.json that decide how much memory the model takes."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    max_position_embeddings: int


KNOWN: Mapping[str, Sizes] = {
    "Qwen/Qwen2.5-0.5B-Instruct": Sizes("qwen2", 896, 4864, 24, 14, 2, 64, 151936, True, 32768),
    "Qwen/Qwen2.5-1.5B-Instruct": Sizes("qwen2", 1536, 8960, 28, 12, 2, 128, 151936, True, 32768),
    "Qwen/Qwen2.5-3B-Instruct": Sizes("qwen2", 2048, 11008, 36, 16, 2, 128, 151936, True, 32768),
    "Qwen/Qwen2.5-7B-Instruct": Sizes("qwen2", 3584, 18944, 28, 28, 4, 128, 152064, False, 32768),
    "Qwen/Qwen2.5-14B-Instruct": Sizes("qwen2", 5120, 13824, 48, 40, 8, 128, 152064, False, 32768),
    "Qwen/Qwen2.5-32B-Instruct": Sizes("qwen2", 5120, 27648, 64, 40, 8, 128, 152064, False, 32768),
    "Qwen/Qwen2.5-72B-Instruct": Sizes("qwen2", 8192, 29568, 80, 64, 8, 128, 152064, False, 32768),
    "Qwen/Qwen3-0.6B": Sizes("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, True, 40960),
    "Qwen/Qwen3-1.7B": Sizes("qwen3", 2048, 6144, 28, 16, 8, 128, 151936, True, 40960),
    "Qwen/Qwen3-4B": Sizes("qwen3", 2560, 9728, 36, 32, 8, 128, 151936, True, 40960),
    "Qwen/Qwen3-8B": Sizes("qwen3", 4096, 12288, 36, 32, 8, 128, 151936, False, 40960),
    "Qwen/Qwen3-14B": Sizes("qwen3", 5120, 17408, 40, 40, 8, 128, 151936, False, 40960),
    "Qwen/Qwen3-32B": Sizes("qwen3", 5120, 25600, 64, 64, 8, 128, 151936, False, 40960),
    "meta-llama/Llama-3.1-8B-Instruct": Sizes("llama", 4096, 14336, 32, 32, 8, 128, 128256, False, 131072),
    "meta-llama/Llama-3.2-1B-Instruct": Sizes("llama", 2048, 8192, 16, 32, 8, 64, 128256, True, 131072),
    "meta-llama/Llama-3.2-3B-Instruct": Sizes("llama", 3072, 8192, 28, 24, 8, 128, 128256, True, 131072),
    "meta-llama/Llama-3.3-70B-Instruct": Sizes("llama", 8192, 28672, 80, 64, 8, 128, 128256, False, 131072),
    "mistralai/Mistral-7B-Instruct-v0.3": Sizes("mistral", 4096, 14336, 32, 32, 8, 128, 32768, False, 32768),
    "microsoft/phi-4": Sizes("phi3", 5120, 17920, 40, 40, 10, 128, 100352, False, 16384),
    "HuggingFaceTB/SmolLM3-3B": Sizes("smollm3", 2048, 11008, 36, 16, 4, 128, 128256, True, 65536),
    "ibm-granite/granite-3.3-8b-instruct": Sizes("granite", 4096, 12800, 40, 32, 8, 128, 49159, True, 131072),
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": Sizes(
        "mistral", 5120, 32768, 40, 32, 8, 128, 131072, False, 131072
    ),
    "google/gemma-3-1b-it": Sizes("gemma3_text", 1152, 6912, 26, 4, 1, 256, 262144, True, 32768),
    "google/gemma-3-4b-it": Sizes("gemma3_text", 2560, 10240, 34, 8, 4, 256, 262208, True, 131072),
    "google/gemma-3-12b-it": Sizes("gemma3_text", 3840, 15360, 48, 16, 8, 256, 262208, True, 131072),
    "google/gemma-3-27b-it": Sizes("gemma3_text", 5376, 21504, 62, 32, 16, 128, 262208, True, 131072),
}


def known_format(base: str) -> str | None:
    """Return the 4-bit format at the end of a model's name, e.g. nvfp4 for nvidia/Qwen3-8B-NVFP4, or None."""
    ending = _FORMAT.search(base.rstrip("/"))
    return ending and ending[1].lower()


def known_config(base: str) -> Mapping[str, Any] | None:
    """Return the values of a model's config.json that decide how much memory it takes, from the table ``KNOWN``, given
    the model's name or folder; None if the table does not have the model. When names are compared, parent folders,
    case, and endings such as -Instruct and -NVFP4 are ignored."""
    name = _short(base)
    sizes = next((sizes for known, sizes in KNOWN.items() if _short(known) == name), None)
    if sizes is None:
        return None
    config = sizes._asdict()
    if sizes.head_dim * sizes.num_attention_heads == sizes.hidden_size:
        del config["head_dim"]  # as in the model's config.json
    return config


def _short(name: str) -> str:
    return _FORMAT.sub("", name.rstrip("/")).rpartition("/")[2].lower().removesuffix("-instruct")
