"""What both engines do alike: refuse bad prompts, find the tokens that end a completion, read an adapter's norms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, PretrainedConfig

from qerl_pl.common.seeding import derive_seed

PEFT_PREFIX = "base_model.model."


def check_prompts(
    prompts: Sequence[Sequence[int]], *, vocab_size: int, max_model_len: int, max_tokens: int = 0
) -> None:
    """Refuse a batch that cannot be sampled from as a whole, before any of it is queued.

    Args:
        prompts: token ids.
        vocab_size: rows of the embedding.
        max_model_len: longest prompt plus completion, in tokens.
        max_tokens: longest completion; 0 when given tokens are scored.

    Raises:
        ValueError: names the first prompt that is empty, holds an unknown token, or leaves less room than max_tokens.
    """
    for index, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompt {index} is empty; expected at least one token")
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            unknown = next(token for token in prompt if not 0 <= token < vocab_size)
            raise ValueError(f"prompt {index} holds token {unknown}; expected 0 to {vocab_size - 1}")
        if len(prompt) + max_tokens > max_model_len:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens and max_tokens is {max_tokens}; together they may be at most "
                f"max_model_len = {max_model_len}: drop the prompt, or change one of the two"
            )


def request_seeds(prompts: Sequence[Sequence[int]], num_completions: int, seed: int | Sequence[int]) -> list[int]:
    """A seed for each completion, prompt by prompt: a function of the prompt, not of its place among the others.

    So a batch is sampled the same however it is shared among ranks. Prompts that are equal get different seeds: by
    their number in the call, or by what ``seed`` has for each.

    Args:
        prompts: token ids.
        num_completions: of each prompt.
        seed: of the call, or of each prompt.
    """
    if not isinstance(seed, int):
        return [
            derive_seed(own, f"prompt {list(prompt)}", copy)
            for prompt, own in zip(prompts, seed, strict=True)
            for copy in range(num_completions)
        ]
    seen: Counter[str] = Counter()
    seeds = []
    for prompt in prompts:
        purpose = f"prompt {list(prompt)}"
        first = num_completions * seen[purpose]
        seen[purpose] += 1
        seeds += [derive_seed(seed, purpose, first + copy) for copy in range(num_completions)]
    return seeds


def end_tokens(base: str, config: PretrainedConfig) -> list[int]:
    """Ids that end a completion: the end-of-sequence tokens of the generation config, the config and the tokenizer.

    Chat models often name different ones in the three places, and each of them is meant to end a turn. Nothing else of
    the generation config (a temperature, a repetition penalty) is used.

    Args:
        base: checkpoint folder. A file that it lacks adds nothing.
        config: the base's configuration.
    """
    found = [config.eos_token_id]
    if (Path(base) / "generation_config.json").is_file():
        found.append(GenerationConfig.from_pretrained(base).eos_token_id)
    if (Path(base) / "tokenizer_config.json").is_file():
        found.append(_tokenizer_end(base))
    ids = [token for entry in found for token in (entry if isinstance(entry, list) else [entry])]
    return sorted({token for token in ids if token is not None})


@cache
def _tokenizer_end(base: str) -> int | None:
    """A large tokenizer takes half a second to load, and the canary's second engine starts in every rollout."""
    return AutoTokenizer.from_pretrained(base).eos_token_id


def trained_norms(adapter: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What an adapter holds beside LoRA matrices, by the model's own names: norm weights, where they are trained."""
    return {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in adapter.items() if ".lora_" not in name}
