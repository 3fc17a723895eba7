"""Turn scored completions into tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qerl_pl.common.types import Completion, Experience, Prompt


def collate(
    prompts: Sequence[Prompt],
    completions: Sequence[Completion],
    *,
    rewards: Tensor,
    scored: Tensor,
    advantages: Tensor,
    in_loss: Tensor,
) -> Experience:
    """Build the right-padded tensors of one batch from scored completions.

    Args:
        prompts: [B] the prompt of each row.
        completions: [B] the completion of each row.
        rewards: [B] fp32.
        scored: [B] bool, False for rows that no reward could score.
        advantages: [B] fp32.
        in_loss: [B] bool, False for rows that are left out of the loss, because they have no score, or were cut off at
            max_tokens and ``filter_truncated`` is set.

    Raises:
        ValueError: the arguments have different numbers of rows, or a completion has different numbers of tokens and
            log-probabilities.
    """
    if not len(prompts) == len(completions) == len(rewards) == len(advantages) == len(in_loss):
        raise ValueError(
            f"{len(prompts)} prompts, {len(completions)} completions, {len(rewards)} rewards, {len(advantages)} "
            f"advantages and {len(in_loss)} flags; expected equal numbers"
        )
    rows = list(zip(prompts, completions, strict=True))
    lengths = [len(prompt.tokens) + len(completion.tokens) for prompt, completion in rows]
    tokens = torch.zeros((len(rows), max(lengths)), dtype=torch.int64)  # [B, S]; padding is token 0
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
