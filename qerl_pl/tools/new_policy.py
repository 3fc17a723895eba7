"""Create tokenizer and model of a new policy with random weights, and write them to a folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import AddedToken, GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from qerl_pl.common.files import allow_reading
from qerl_pl.common.seeding import derive_seed

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
"""Files of a finished folder, in addition to its record."""


def make_tokenizer() -> Qwen2Tokenizer:
    """Create a byte-level tokenizer, which can encode any text: a token is a byte of the text, which is normalised to
    Unicode form C first. The tags ``<think>``, ``<answer>`` and their ends are tokens of their own, which decoding
    keeps."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # AutoTokenizer loads every Qwen2 model's tokenizer with this class, whatever class the folder names.
    tokenizer = Qwen2Tokenizer(
        vocab={char: token for token, char in enumerate(alphabet)},
        merges=[],
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
    )
    for tag in TAGS:
        tokenizer.add_tokens(AddedToken(tag, special=False, normalized=False))
    return tokenizer


def random_model(tokenizer: Qwen2Tokenizer, *, seed: int, purpose: str, **shape: Any) -> Qwen2ForCausalLM:
    """Create a Qwen2 model with random fp32 weights, which depend on seed and purpose alone.

    The states of the global random generators are left as they are.

    Args:
        tokenizer: tokenizer whose end and padding tokens become the model's.
        seed: seed of the weights.
        purpose: name that is hashed with the seed; different names give unrelated weights.
        shape: fields of Qwen2Config.
    """
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen2Config(tie_word_embeddings=False, bos_token_id=None, **ends, **shape)
    with torch.random.fork_rng(devices=[]):  # transformers draws weights from the global generator
        torch.default_generator.manual_seed(derive_seed(seed, purpose))
        model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(**ends)
    return model


def partial_folder(output: Path) -> Path:
    """Return the path of the temporary folder in which a policy is written, and which is renamed to ``output`` when
    complete."""
    return output.with_name(f".{output.name}.partial")


def check_place(output: Path) -> None:
    """Refuse an output folder that cannot be written, before any work is done.

    Raises:
        ValueError: the folder is not empty.
        OSError: it cannot be written.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} exists and is not an empty folder; remove it or choose another --output")
    partial = partial_folder(output)
    partial.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(partial)


def write_policy(output: Path, model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, texts: dict[str, str]) -> None:
    """Write a policy's folder atomically: to a temporary folder, which is then renamed.

    Args:
        output: folder of the policy.
        model: model, in the dtype in which it is written.
        tokenizer: tokenizer of the model.
        texts: contents of further text files by file name.
    """
    partial = partial_folder(output)
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed
    partial.mkdir(parents=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    for path in partial.iterdir():
        allow_reading(path)
    for name, text in texts.items():
        (partial / name).write_text(text, encoding="utf-8")
    partial.replace(output)
