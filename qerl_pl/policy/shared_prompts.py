"""Pack rows such that a prompt that several rows share occurs, and is computed, only once per pass.

A group of G completions of C tokens to a prompt of P tokens takes P + G C tokens instead of G (P + C). The packed
sequence holds all prompts, then all completions, those of the same prompt together. The tokens of a completion attend
to its prompt and to the completion's earlier tokens. On a GPU, FlashAttention is called once for each of these two
parts, and the results are merged by their log-sum-exps. Given the merged output and log-sum-exps, FlashAttention's
backward returns the exact gradient of each part.

Letters: B rows, S columns, T packed tokens.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import PretrainedConfig

from qerl_pl.model.layers import attention_windows

WORTH = 1 / 16
"""Smallest share of a pass's tokens for which sharing prompts pays; if it saves fewer tokens, the second attention call
costs more than it saves."""


@dataclass(frozen=True)
class SharedPrompts:
    """Boundaries, in a packed sequence, of shared prompts and of the completions that attend to them."""

    num_prompt_tokens: int
    """Number of tokens of all prompts together, which come first in the packed sequence."""
    keys: Tensor
    """[G + 1] int32, boundaries of the G prompts that have completions; these are the first prompts of the sequence."""
    queries: Tensor
    """[G + 1] int32, boundaries between the completions of one prompt and those of the next, as indices of completion
    tokens (0 is the token after all prompts)."""
    num_keys: int
    """Tokens of the G prompts."""
    longest_key: int
    """Tokens of the longest prompt."""
    longest_query: int
    """Largest number of tokens that the completions of one prompt have together."""


class Layout(NamedTuple):
    """Rows that are packed with shared prompts."""

    tokens: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64, position of each token in its row."""
    rows: Tensor
    """[T] int64, row of each token; of a shared prompt's, the first row that has it."""
    starts: Tensor
    """[N + 1] int32, boundaries of prompts and completions, without empty completions."""
    longest: int
    """Tokens of the longest prompt or completion."""
    shared: SharedPrompts | None
    """None: no completion has a token, so the sequence has only prompts."""
    prompt_ends: Tensor
    """[B] int64, packed index of the last token of each row's prompt."""
    own_starts: Tensor
    """[B] int64, packed index of the first token of each row's completion."""


def attends_to_everything(config: PretrainedConfig) -> bool:
    """Return whether every layer attends to all earlier tokens; layers with sliding windows or recurrent states cannot
    share prompts."""
    return all(window is None for window in attention_windows(config))


def first_equal(tokens: Tensor, prompts: Tensor) -> Tensor:
    """Return, for each row of [B, S] int64, the index of the first row with the same prompt: [B] int64; ``prompts`` [B]
    are the lengths of the rows' prompts."""
    column = torch.arange(tokens.shape[1], device=tokens.device)
    in_prompt = column < prompts.unsqueeze(1)  # [B, S]
    mixed = (column + 1) * 0x5851F42D4C957F2D  # int64 products wrap around
    sums = ((tokens + 1) * (mixed ^ (mixed >> 29))).masked_fill(~in_prompt, 0).sum(dim=1)  # [B]
    _, group = sums.unique(return_inverse=True)
    row = torch.arange(len(tokens), device=tokens.device)
    first = torch.full_like(row, len(tokens)).scatter_reduce(0, group, row, "amin")[group]
    equal = (prompts == prompts[first]) & ((tokens == tokens[first]) | ~in_prompt).all(dim=1)
    return torch.where(equal, first, row)  # different prompts with equal sums are not shared


def reused_tokens(tokens: Tensor, prompts: Tensor) -> Tensor:
    """Count, for each row, the prompt tokens that an earlier row with the same prompt computes: [B] int64."""
    return prompts * (first_equal(tokens, prompts) != torch.arange(len(tokens), device=tokens.device))


def share_prompts(tokens: Tensor, prompts: Tensor, lengths: Tensor) -> Layout | None:
    """Pack rows such that equal prompts occur only once; return None if that would save less than a share ``WORTH`` of
    the tokens. Micro-batches are planned by the same rule (``micro_batches_of_groups``).

    Args:
        tokens: [B, S] int64.
        prompts: [B] int64, length of each row's prompt, at least 1.
        lengths: [B] int64, number of tokens to take from each row, the prompt included.
    """
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    in_prompt = columns < prompts.unsqueeze(1)  # [B, S]
    heads, group = first_equal(tokens, prompts).unique(return_inverse=True)
    num_own = lengths - prompts
    saved, total = torch.stack([prompts.sum() - prompts[heads].sum(), lengths.sum()]).tolist()
    if saved < WORTH * total:
        return None
    in_group = torch.zeros_like(heads).index_add_(0, group, num_own)
    order = torch.argsort((in_group == 0).int(), stable=True)  # prompts without completion tokens come last
    heads, in_group, group = heads[order], in_group[order], torch.argsort(order)[group]
    rows = torch.argsort(group, stable=True)  # the completions of a prompt come one after another
    prompt_ends, own_ends = prompts[heads].cumsum(0), num_own[rows].cumsum(0)
    used = in_group > 0
    numbers = prompt_ends[-1], used.sum(), (used * prompts[heads]).sum(), prompts.max(), num_own.max(), in_group.max()
    num_prompt_tokens, num_used, num_keys, longest_prompt, longest_own, longest_group = torch.stack(numbers).tolist()
    parts = (heads, in_prompt[heads]), (rows, ((columns < lengths.unsqueeze(1)) & ~in_prompt)[rows])
    return Layout(
        torch.cat([tokens[chosen][inside] for chosen, inside in parts]),
        torch.cat([columns.expand_as(inside)[inside] for _, inside in parts]),
        torch.cat([chosen.unsqueeze(1).expand_as(inside)[inside] for chosen, inside in parts]),
        _boundaries(torch.cat([prompt_ends, num_prompt_tokens + own_ends]).unique_consecutive()),
        max(longest_prompt, longest_own),
        SharedPrompts(
            num_prompt_tokens,
            _boundaries(prompt_ends[:num_used]),
            _boundaries(in_group[:num_used].cumsum(0)),
            num_keys,
            longest_prompt,
            longest_group,
        )
        if num_used
        else None,
        (prompt_ends - 1)[group],
        num_prompt_tokens + torch.zeros_like(num_own).index_copy_(0, rows, own_ends - num_own[rows]),
    )


def shared_attention(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, shared: SharedPrompts, scale: float | None
) -> Tensor:
    """Compute causal attention of packed rows with shared prompts, [T, heads, D]; ``starts``, ``longest`` and
    ``shared`` are fields of ``Layout``. On a GPU in 16 bits it is torch's FlashAttention 2."""
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _SharedAttention.apply(query, key, value, starts, longest, shared, scale)
    return shared_attention_reference(query, key, value, starts, shared, scale)


def shared_attention_reference(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, shared: SharedPrompts, scale: float | None = None
) -> Tensor:
    """Compute ``shared_attention`` with a full score matrix [T, T], as its definition."""
    place = torch.arange(len(query))
    row = torch.zeros_like(place)  # for each token, the number of its prompt or completion
    asks, answers = torch.full_like(place, -1), torch.full_like(place, -2)  # prompt that a token attends to, or is in
    for index, (start, end) in enumerate(pairwise(starts.tolist())):
        row[start:end] = index
    for index, (start, end) in enumerate(pairwise(shared.keys.tolist())):
        answers[start:end] = index
    for index, (start, end) in enumerate(pairwise(shared.queries.tolist())):
        asks[shared.num_prompt_tokens + start : shared.num_prompt_tokens + end] = index
    same_row = (row[:, None] == row) & (place[:, None] >= place)
    seen = (same_row | (asks[:, None] == answers)).to(query.device)  # [T, T]
    q, k, v = (part.transpose(0, 1) for part in (query, key, value))  # [heads, T, D]
    k, v = (part.repeat_interleave(len(q) // len(part), dim=0) for part in (k, v))
    scores = q @ k.transpose(1, 2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1)


class _SharedAttention(torch.autograd.Function):
    """Two FlashAttention calls: within each prompt and each completion, and of completions to their prompts."""

    @staticmethod
    def forward(
        ctx,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        starts: Tensor,
        longest: int,
        shared: SharedPrompts,
        scale: float | None,
    ) -> Tensor:
        flash: Any = torch.ops.aten._flash_attention_forward
        behind = slice(shared.num_prompt_tokens, None)
        prompt_key, prompt_value = key[: shared.num_keys], value[: shared.num_keys]
        rows = query, key, value, starts, starts, longest, longest
        output, lse, *random = flash(*rows, 0.0, True, False, scale=scale)  # [T, heads, D], [heads, T]
        across = shared.queries, shared.keys, shared.longest_query, shared.longest_key
        other, other_lse, *_ = flash(query[behind], prompt_key, prompt_value, *across, 0.0, False, False, scale=scale)
        merged = torch.logaddexp(lse[:, behind], other_lse)
        own_share, other_share = ((part - merged).exp().t().unsqueeze(-1) for part in (lse[:, behind], other_lse))
        output[behind] = own_share * output[behind] + other_share * other
        lse[:, behind] = merged
        ctx.save_for_backward(query, key, value, output, lse, starts, *random[:2])
        ctx.longest, ctx.shared, ctx.scale = longest, shared, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        flash: Any = torch.ops.aten._flash_attention_backward
        query, key, value, output, lse, starts, *random = ctx.saved_tensors
        shared, longest = ctx.shared, ctx.longest
        gradient = grads[0].contiguous()
        d_query, d_key, d_value = flash(
            gradient, query, key, value, output, lse, starts, starts, longest, longest, 0.0, True, *random,
            scale=ctx.scale,
        )  # fmt: skip
        behind, keys = slice(shared.num_prompt_tokens, None), slice(shared.num_keys)
        across = shared.queries, shared.keys, shared.longest_query, shared.longest_key
        parts = gradient[behind], query[behind], key[keys], value[keys], output[behind], lse[:, behind].contiguous()
        gradients_across = flash(*parts, *across, 0.0, False, *random, scale=ctx.scale)
        for whole, where, part in zip((d_query, d_key, d_value), (behind, keys, keys), gradients_across, strict=True):
            whole[where] += part
        return d_query, d_key, d_value, None, None, None, None


def _boundaries(ends: Tensor) -> Tensor:
    return F.pad(ends, (1, 0)).to(torch.int32)
