"""Completions to tensors, and rows to micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qerl_pl.types import Completion, Experience, Prompt


def collate(
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    *,
    rewards: Tensor,
    scored: Tensor,
    advantages: Tensor,
    in_loss: Tensor,
    pad_token: int = 0,
) -> Experience:
    """Scored completions as one right-padded batch.

    Args:
        prompts: [B] the prompt of each row.
        completions: [B].
        rewards: [B] fp32.
        scored: [B] bool.
        advantages: [B] fp32.
        in_loss: [B] bool, False for rows whose tokens do not count: unscored, or cut off and filtered.
        pad_token: any valid token; it is never looked at.

    Raises:
        ValueError: the numbers of rows differ, or logprobs do not match their tokens.
    """
    if not len(prompts) == len(completions) == len(rewards) == len(advantages) == len(in_loss):
        raise ValueError(
            f"{len(prompts)} prompts, {len(completions)} completions, {len(rewards)} rewards, {len(advantages)} "
            f"advantages and {len(in_loss)} flags; expected equal numbers"
        )
    rows = list(zip(prompts, completions, strict=True))
    lengths = [len(prompt.tokens) + len(completion.tokens) for prompt, completion in rows]
    tokens = torch.full((len(rows), max(lengths)), pad_token, dtype=torch.int64)  # [B, S]
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    sampler_logprobs = torch.zeros_like(tokens, dtype=torch.float32)
    for row, (prompt, completion) in enumerate(rows):
        if len(completion.tokens) != len(completion.logprobs):
            raise ValueError(f"row {row} has {len(completion.tokens)} tokens and {len(completion.logprobs)} logprobs")
        start, end = len(prompt.tokens), lengths[row]
        tokens[row, :end] = torch.tensor(prompt.tokens + completion.tokens)
        mask[row, start:end] = True
        sampler_logprobs[row, start:end] = torch.tensor(completion.logprobs)
    return Experience(
        tokens=tokens,
        lengths=torch.tensor(lengths),
        mask=mask & in_loss.unsqueeze(1),
        sampled=mask,
        sampler_logprobs=sampler_logprobs,
        rewards=rewards,
        scored=scored,
        advantages=advantages,
    )


def micro_batches(lengths: Tensor, max_tokens: int) -> list[Tensor]:
    """Row indices in micro-batches of at most ``max_tokens`` tokens, padding included.

    Rows are sorted by length, so little is padded, and equal lengths keep their order, so the split is a function of
    the lengths alone.

    Args:
        lengths: [B] int64, tokens of each row.
        max_tokens: rows times the longest of them may not exceed this.

    Returns:
        Index tensors that hold every row once; none for no rows.

    Raises:
        ValueError: one row alone is longer than ``max_tokens``.
    """
    if len(lengths) and int(lengths.max()) > max_tokens:
        raise ValueError(
            f"a row of {int(lengths.max())} tokens is longer than micro_batch_tokens ({max_tokens}); raise it to at "
            "least the longest prompt plus max_tokens of the sampling"
        )
    order = torch.argsort(lengths, stable=True, descending=True)
    batches: list[list[int]] = []
    longest = 0
    for row in order.tolist():
        if not batches or (len(batches[-1]) + 1) * longest > max_tokens:
            batches.append([])
            longest = int(lengths[row])
        batches[-1].append(row)
    return [torch.tensor(batch) for batch in batches]
