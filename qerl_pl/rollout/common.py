"""Helpers of the rollout engines (vLLM and transformers)."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, GenerationConfig, PretrainedConfig

from qerl_pl.common.batching import micro_batches
from qerl_pl.common.seeding import derive_seed
from qerl_pl.common.types import Completion

PEFT_PREFIX = "base_model.model."


def check_prompts(
    prompts: Sequence[Sequence[int]], *, vocab_size: int, max_model_len: int, max_tokens: int = 0
) -> None:
    """Raise ValueError for the first prompt that is empty, has a token id outside the vocabulary, or is too long: with
    a completion of ``max_tokens`` tokens (0 if sequences are only scored) it would have more than ``max_model_len``."""
    for index, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompt {index} is empty; expected at least one token")
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            unknown = next(token for token in prompt if not 0 <= token < vocab_size)
            raise ValueError(f"prompt {index} holds token {unknown}; expected 0 to {vocab_size - 1}")
        if len(prompt) + max_tokens > max_model_len:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens and max_tokens is {max_tokens}; together they may be at most "
                f"max_model_len = {max_model_len}: drop the prompt, lower max_tokens or raise max_model_len"
            )


def request_seeds(prompts: Sequence[Sequence[int]], num_completions: int, seed: int | Sequence[int]) -> list[int]:
    """Derive a seed for each completion of each prompt, in order, from the tokens of its prompt and not from the
    prompt's index, so the completions of a batch are the same however its prompts are divided among ranks.

    Equal prompts need different seeds, or their completions would be equal. If ``seed`` is a single seed, a prompt's
    seeds also depend on the number of equal prompts before it in this call. If ``seed`` has one seed per prompt, the
    caller has to give equal prompts different seeds.
    """
    if not isinstance(seed, int):
        return [
            derive_seed(seed_of_prompt, f"prompt {list(prompt)}", copy)
            for prompt, seed_of_prompt in zip(prompts, seed, strict=True)
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


def with_due_seeds(
    groups: Sequence[Sequence[Completion]], prompts: Sequence[Sequence[int]], seed: int | Sequence[int]
) -> list[list[Completion]]:
    """Set the seed of each completion to the one with which its request had to be sampled (``request_seeds``), whatever
    seed the engine reports. If no completion has a seed, all are returned unchanged.

    The trainer later computes from this seed which tokens the engine must have sampled. With the reported seeds, it
    would not notice an engine that answers other requests, or returns only some of the completions that it samples.
    """
    rows = [row for group in groups for row in group]
    if all(row.seed is None for row in rows):
        return [list(group) for group in groups]
    due = iter(request_seeds(prompts, len(rows) // len(prompts), seed))
    return [[replace(row, seed=next(due)) for row in group] for group in groups]


def end_tokens(base: str, config: PretrainedConfig) -> list[int]:
    """Collect the ids of the tokens that end a completion: the end-of-sequence tokens of the generation config, the
    model config and the tokenizer of a checkpoint folder, which often differ in chat models. Missing files are skipped,
    and so are tokens that were added to the tokenizer alone, because the model has no logit for them. Other settings of
    the generation config, such as a temperature, are not used."""
    places = [config.eos_token_id]
    if (Path(base) / "generation_config.json").is_file():
        places.append(GenerationConfig.from_pretrained(base).eos_token_id)
    if (Path(base) / "tokenizer_config.json").is_file():
        places.append(_tokenizer_end(base))
    ids = [token for entry in places for token in (entry if isinstance(entry, list) else [entry])]
    return sorted({token for token in ids if token is not None and token < config.vocab_size})


@cache
def _tokenizer_end(base: str) -> int | None:
    """Return the tokenizer's end token; cached, because a large tokenizer takes half a second to load."""
    return AutoTokenizer.from_pretrained(base).eos_token_id


def trained_norms(adapter: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the trained norm weights in an adapter, by their names in the model without PEFT."""
    return {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in adapter.items() if ".lora_" not in name}


def different(live: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the tensors in ``wanted`` that differ from those in ``live``, waiting for the GPU only
    once."""
    if not wanted:
        return []
    differ = torch.stack([(live[name] != tensor).any() for name, tensor in wanted.items()])
    return [name for name, differs in zip(wanted, differ.tolist(), strict=True) if differs]


def padded_routes(routes: Sequence[Tensor]) -> Tensor | None:
    """Pad ``Completion.routes`` of B rows (prompts with completions), [tokens - 1, L layers, k experts] each, with 0 to
    one tensor [B, S, L, k], where S is the largest number of tokens of a row; None if ``routes`` is empty."""
    return F.pad(pad_sequence([*routes], batch_first=True), (0, 0, 0, 0, 0, 1)) if routes else None


def padded(rows: Sequence[Sequence[int]], *, left: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Pad B rows of tokens with token 0 to the longest, S tokens, on the left or right; returns tokens [B, S] int64 and
    a mask [B, S] bool, False at padding, both on ``device``."""
    side = "left" if left else "right"
    tokens = pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_side=side)
    real = [torch.ones(len(row), dtype=torch.bool) for row in rows]
    return tokens.to(device), pad_sequence(real, batch_first=True, padding_side=side).to(device)


def all_logprobs(completions: Sequence[Completion]) -> Tensor:
    """Return the log-probabilities of the N tokens of completions, in order, [N] fp32 in nats."""
    # torch takes six times as long to read numbers of Python
    return torch.from_numpy(np.fromiter(chain.from_iterable(row.logprobs for row in completions), dtype=np.float32))


def row_of_each_token(completions: Sequence[Completion]) -> Tensor:
    """Return, for each of the N tokens of completions in order, the position of its completion: [N] int64."""
    lengths = torch.tensor([len(completion.tokens) for completion in completions])
    return torch.arange(len(completions)).repeat_interleave(lengths)


class Pass(NamedTuple):
    """Inputs of a forward pass that computes log-probabilities of completions."""

    rows: list[int]
    """Index of each of the B completions."""
    lengths: list[int]
    """Number of tokens of each completion."""
    tokens: Tensor
    """[B, S] int64, prompts followed by their completions, padded on the right."""
    mask: Tensor
    """[B, S] bool, True for the tokens of the completions."""
    routes: Tensor | None
    """The completions' routes (``padded_routes``); None if they have none."""


def passes(
    prompts: Sequence[Sequence[int]], completions: Sequence[Completion], limit: int, device: torch.device
) -> Iterator[Pass]:
    """Divide completions, each preceded by its prompt, into forward passes of at most ``limit`` tokens
    (``micro_batches``)."""
    lengths = [len(completion.tokens) for completion in completions]
    totals = torch.tensor([len(prompt) + length for prompt, length in zip(prompts, lengths, strict=True)])
    for chosen in micro_batches(totals, limit):
        rows = chosen.tolist()
        texts = [[*prompts[row], *completions[row].tokens] for row in rows]
        tokens, real = padded(texts, left=False, device=device)
        starts = torch.tensor([len(prompts[row]) for row in rows], device=device).unsqueeze(1)
        mask = real & (torch.arange(tokens.shape[1], device=device) >= starts)
        given = [routes.to(device) for row in rows if (routes := completions[row].routes) is not None]
        yield Pass(rows, [lengths[row] for row in rows], tokens, mask, padded_routes(given))
