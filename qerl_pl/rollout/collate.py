"""Turn scored completions into tensors, and divide rows (a prompt and its completion each) into micro-batches."""

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


def micro_batches(lengths: Tensor, max_tokens: int) -> list[Tensor]:
    """Divide rows into micro-batches of at most ``max_tokens`` tokens; rows are computed without padding, so only their
    own tokens count.

    The algorithm is first-fit decreasing, which gives at most about 11/9 of the smallest possible number of
    micro-batches. Rows of equal length keep their order, so the result depends only on the lengths.

    Args:
        lengths: [B] int64, tokens of each row.
        max_tokens: limit on the sum of the lengths in a micro-batch.

    Returns:
        Row indices of each micro-batch, int64; every row occurs once. Empty without rows.

    Raises:
        ValueError: a single row is longer than ``max_tokens``.
    """
    if len(lengths) and int(lengths.max()) > max_tokens:
        raise ValueError(
            f"a row of {int(lengths.max())} tokens is longer than micro_batch_tokens ({max_tokens}); raise it to at "
            "least the longest prompt plus max_tokens of the sampling"
        )
    sizes = lengths.tolist()
    batches: list[list[int]] = []
    room: list[int] = []
    for row in sorted(range(len(sizes)), key=lambda row: -sizes[row]):
        place = next((place for place, free in enumerate(room) if sizes[row] <= free), len(batches))
        if place == len(batches):
            batches.append([])
            room.append(max_tokens)
        batches[place].append(row)
        room[place] -= sizes[row]
    return [torch.tensor(batch) for batch in batches]


def micro_batches_of_groups(lengths: Tensor, prompts: Tensor, group: Tensor, max_tokens: int) -> list[Tensor]:
    """Divide rows into micro-batches in which the rows of a group share one copy of their prompt.

    Each group is split into units, each with as many of its rows as fit into one micro-batch. ``micro_batches`` then
    divides the units, as if each were a row.

    Args:
        lengths: [B] int64, tokens of each row, the prompt included.
        prompts: [B] int64, tokens of each row's prompt, the same for all rows of a group.
        group: [B] int64, index of each row's group.
        max_tokens: limit on the tokens of a micro-batch, in which a group's prompt counts once.

    Returns:
        Row indices of each micro-batch, int64; every row occurs once. Empty without rows.

    Raises:
        ValueError: a single row is longer than ``max_tokens``.
    """
    units: dict[tuple[int, int], list[int]] = {}
    sizes: dict[tuple[int, int], int] = {}
    parts: dict[int, int] = {}
    for row, (length, prompt, number) in enumerate(
        zip(lengths.tolist(), prompts.tolist(), group.tolist(), strict=True)
    ):
        key = number, parts.setdefault(number, 0)
        if key in units and sizes[key] + length - prompt > max_tokens:
            parts[number] += 1
            key = number, parts[number]
        sizes[key] = sizes[key] + length - prompt if key in units else length
        units.setdefault(key, []).append(row)
    rows = list(units.values())
    chosen = micro_batches(torch.tensor(list(sizes.values()), dtype=torch.int64), max_tokens)
    return [torch.tensor([row for unit in some.tolist() for row in rows[unit]]) for some in chosen]
