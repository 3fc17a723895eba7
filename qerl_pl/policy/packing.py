"""Pack rows, each a prompt and its completion, without padding into one sequence, and compute hidden states of the
packed tokens.

The model processes [1, T] tokens, where T is the sum of the rows' lengths; only attention (``policy.attention``) and
recurrent layers (``policy.delta_net``) have to know where rows end. If several rows of a forward pass have the same
prompt, the packed sequence holds the prompt only once, provided that this saves enough tokens (``WORTH``). The model
then computes P + G C tokens instead of G (P + C) for G completions of C tokens to a prompt of P tokens. Such a packed
sequence holds all prompts, then all completions, those of the same prompt together. The tokens of a completion attend
to its prompt and to the completion's earlier tokens.

Letters: B rows, S columns, T packed tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PretrainedConfig, PreTrainedModel

from qerl_pl.common.batching import micro_batches
from qerl_pl.model.layers import attention_windows
from qerl_pl.quant.experts import UNSEEN, Replay

WORTH = 1 / 16
"""Smallest fraction of the tokens of a forward pass that must be saved by packing equal prompts once, because this
needs a second attention call."""


@dataclass(frozen=True)
class SharedPrompts:
    """Boundaries, in a packed sequence, of prompts that several completions share, and of their completions."""

    num_prompt_tokens: int
    """Number of tokens of all prompts together, which come first in the packed sequence."""
    keys: Tensor
    """[G + 1] int32, boundaries of the G prompts that have completions; these are the first prompts of the sequence."""
    queries: Tensor
    """[G + 1] int32, boundaries between the completions of one prompt and those of the next, counted in completion
    tokens: 0 is the first token after all prompts."""
    num_keys: int
    """Tokens of the G prompts."""
    longest_key: int
    """Tokens of the longest prompt."""
    longest_query: int
    """Largest number of tokens that the completions of one prompt have together."""


@dataclass(frozen=True)
class Packed:
    """Packed rows: T tokens of B rows, one row after another."""

    tokens: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64, position of each token in its row."""
    rows: Tensor
    """[T] int64, index of the row of each token; of the first row with this prompt, for a token of a shared prompt."""
    starts: Tensor
    """[B + 1] int32, index of each row's first token, followed by T."""
    longest: int
    """Tokens of the longest row."""
    shared: SharedPrompts | None = None
    """Boundaries of prompts and completions if the sequence holds each prompt only once; ``starts`` and ``longest``
    then describe prompts and non-empty completions instead of rows. None if it holds whole rows."""


class Layout(NamedTuple):
    """Rows that are packed with shared prompts."""

    packed: Packed
    prompt_ends: Tensor
    """[B] int64, packed index of the last token of each row's prompt."""
    own_starts: Tensor
    """[B] int64, packed index of the first token of each row's completion."""


def attends_to_everything(config: PretrainedConfig) -> bool:
    """Return whether every layer of a model attends to all earlier tokens, without sliding window or recurrent state.
    Only then can several completions share one copy of their prompt in a packed sequence."""
    return all(window is None for window in attention_windows(config))


def shares_prompts(model: PreTrainedModel) -> bool:
    """Return whether a forward pass may hold equal prompts of several rows only once: on a GPU in 16 bits, if all
    layers attend to all earlier tokens."""
    return model.device.type == "cuda" and model.dtype != torch.float32 and attends_to_everything(model.config)


def first_equal(tokens: Tensor, prompts: Tensor) -> Tensor:
    """Return, for each of B rows of ``tokens`` [B, S], the index of the first row that has the same prompt: [B] int64.
    ``prompts`` [B] int64 are the lengths of the prompts, with which the rows begin."""
    column = torch.arange(tokens.shape[1], device=tokens.device)
    in_prompt = column < prompts.unsqueeze(1)  # [B, S]
    mixed = (column + 1) * 0x5851F42D4C957F2D  # int64 products wrap around
    sums = ((tokens + 1) * (mixed ^ (mixed >> 29))).masked_fill(~in_prompt, 0).sum(dim=1)  # [B]
    _, group = sums.unique(return_inverse=True)
    row = torch.arange(len(tokens), device=tokens.device)
    first = torch.full_like(row, len(tokens)).scatter_reduce(0, group, row, "amin")[group]
    equal = (prompts == prompts[first]) & ((tokens == tokens[first]) | ~in_prompt).all(dim=1)
    return torch.where(equal, first, row)  # different prompts with equal sums are not shared


def micro_batches_of_groups(
    lengths: Tensor, prompts: Tensor, group: Tensor, max_tokens: int, *, least_saved: float = WORTH
) -> list[Tensor]:
    """Divide rows, each a prompt and its completion, into micro-batches in which the rows of a group, which have the
    same prompt, share one copy of it. Result and errors are those of ``micro_batches``: row indices per micro-batch,
    the one with the most tokens first.

    Each group is split into units of as many of its rows as fit into one micro-batch, and ``micro_batches`` divides the
    units as if each were a row. A micro-batch in which one copy of equal prompts would save less than a fraction
    ``least_saved``, and which would exceed ``max_tokens`` without sharing, is dissolved: its rows are divided again,
    and every row's prompt counts.

    Args:
        lengths: [B] int64, tokens of each row, the prompt included.
        prompts: [B] int64, tokens of each row's prompt, equal for all rows of a group.
        group: [B] int64, index of each row's group.
        max_tokens: limit on the tokens of a micro-batch, in which a group's prompt counts once.
        least_saved: smallest fraction of a micro-batch's tokens for which ``share_prompts`` packs prompts once.
    """
    lengths = lengths.cpu()
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
    shared = torch.tensor(list(sizes.values()), dtype=torch.int64)
    batches: list[tuple[int, Tensor]] = []  # tokens and rows
    alone: list[Tensor] = []
    for some in micro_batches(shared, max_tokens):
        chosen = torch.tensor([row for unit in some.tolist() for row in rows[unit]])
        tokens, whole = int(shared[some].sum()), int(lengths[chosen].sum())
        if whole <= max_tokens or whole - tokens >= least_saved * whole:
            batches.append((tokens, chosen))
        else:
            alone.append(chosen)
    if alone:
        left = torch.cat(alone)
        batches += [(int(lengths[left[some]].sum()), left[some]) for some in micro_batches(lengths[left], max_tokens)]
    return [chosen for _, chosen in sorted(batches, key=lambda batch: -batch[0])]


def pack(tokens: Tensor, lengths: Tensor) -> Packed:
    """Pack the first ``lengths[b]`` of the tokens [B, S] int64 of each row b. Rows of length 0 are left out."""
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    inside = columns < lengths.unsqueeze(1)  # [B, S]
    starts = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    rows, positions = inside.nonzero(as_tuple=True)
    return Packed(tokens[inside], positions, rows, starts, int(lengths.max()))


def pack_for(tokens: Tensor, mask: Tensor, *, share: bool) -> tuple[Packed, Tensor]:
    """Pack the tokens that the model has to process to predict N tokens, which a mask selects.

    Args:
        tokens: [B, S] int64.
        mask: [B, S] bool, True for tokens to predict, never in column 0. The tokens before a row's first masked token
            are its prompt.
        share: whether equal prompts of several rows may be packed once.

    Returns:
        The packed rows, and [N] int64: for each masked token, in the order of ``mask.nonzero()``, the packed index of
        the token before it, whose hidden state predicts it.
    """
    column = torch.arange(tokens.shape[1], device=tokens.device)
    lengths = (mask * column).amax(dim=1).clamp(min=1)  # a row's last masked token need not be processed
    prompts = torch.where(mask.any(dim=1), mask.int().argmax(dim=1), lengths)
    rows, columns = mask.nonzero(as_tuple=True)
    layout = share_prompts(tokens, prompts, lengths) if share else None
    if layout is None:
        packed = pack(tokens, lengths)
        return packed, packed.starts[rows] + columns - 1
    behind_prompt = columns - 1 - prompts[rows]  # the index behind the prompt; -1: the prompt's last token
    before = torch.where(behind_prompt < 0, layout.prompt_ends[rows], layout.own_starts[rows] + behind_prompt)
    return layout.packed, before


def share_prompts(tokens: Tensor, prompts: Tensor, lengths: Tensor) -> Layout | None:
    """Pack rows such that each prompt occurs only once: all prompts come first, then all completions, those of the same
    prompt together. Returns None if this would save less than a fraction ``WORTH`` of all tokens
    (``micro_batches_of_groups`` assumes the same limit).

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
    packed = Packed(
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
    )
    own_starts = num_prompt_tokens + torch.zeros_like(num_own).index_copy_(0, rows, own_ends - num_own[rows])
    return Layout(packed, (prompt_ends - 1)[group], own_starts)


def predicting(
    model: PreTrainedModel, tokens: Tensor, mask: Tensor, routes: Tensor | None = None
) -> tuple[tuple[Tensor, ...], Tensor, Tensor | None]:
    """Run a model over the tokens that are needed to predict N masked tokens. ``tokens`` is [B, S] int64, and ``mask``
    [B, S] bool is True for the tokens to predict.

    Returns the indices of the masked tokens (rows and columns), the hidden states [N, H] from which they are predicted,
    and a third result, which is None without ``routes``. ``routes`` [B, S, L, k] says which k experts compute each
    token in each of the model's L mixture-of-experts layers, whatever the router chooses. The third result, [B, S, L]
    uint8, counts how many of these experts the router would not have chosen; it is ``UNSEEN`` for tokens that the model
    did not process, such as padding.
    """
    packed, before = pack_for(tokens, mask, share=shares_prompts(model))
    if routes is None:
        others, hidden = None, packed_hidden_states(model.model, packed)  # [T, H]
    else:
        where = packed.rows, packed.positions
        others = torch.full_like(routes[..., 0], UNSEEN, dtype=torch.uint8)
        replay = Replay(routes[where], others[where])
        hidden = packed_hidden_states(model.model, packed, replay)
        others[where] = replay.others
    return mask.nonzero(as_tuple=True), hidden.index_select(0, before), others


def packed_hidden_states(model: Callable[..., Any], packed: Packed, replay: Replay | None = None) -> Tensor:
    """Compute the last hidden states of packed tokens, [T, H], with a decoder that ``use_packed_attention`` has
    prepared. ``replay`` has the indices of the experts that compute each token, [T, L, k], for a model with L
    mixture-of-experts layers that ``quant.experts.use_replay`` has prepared; None: the routers choose the experts."""
    starts, longest = packed.starts, packed.longest
    output = model(
        input_ids=packed.tokens.unsqueeze(0),
        position_ids=packed.positions.unsqueeze(0),
        attention_mask=starts.new_ones(1, 1, 1, 1),  # given a 4-D mask, transformers builds none
        use_cache=False,
        cu_seq_lens_q=starts,
        cu_seq_lens_k=starts,
        max_length_q=longest,
        max_length_k=longest,
        **({} if packed.shared is None else {"shared_prompts": packed.shared}),
        **({} if replay is None else {"replay": replay}),
    )
    return output.last_hidden_state.squeeze(0)


def _boundaries(ends: Tensor) -> Tensor:
    return F.pad(ends, (1, 0)).to(torch.int32)
