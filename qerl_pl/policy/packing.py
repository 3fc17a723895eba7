"""Pack rows without padding into one sequence, with attention that does not cross the rows' boundaries.

The model processes [1, T] tokens, where T is the sum of the rows' lengths; only attention has to know where rows end.
On CUDA in bf16 and fp16, attention is torch's varlen kernel (FlashAttention 2). For other dtypes and devices, and for
heads wider than this kernel supports, queries, keys and values are padded for torch's scaled_dot_product_attention, and
its output is packed again. ``shared_prompts`` computes a prompt once for all rows of a pass that begin with it, if this
saves enough tokens.

Two faster kernels were tried on an H200. cuDNN's, through torch 2.11, returns wrong gradients for packed rows of
unequal lengths and takes a tenth of a second for every new set of lengths. FlashAttention 3, in the form that vLLM
ships, has no backward.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import signature
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qerl_pl.model.layers import head_dims
from qerl_pl.policy.kept import kept_whole
from qerl_pl.policy.shared_prompts import SharedPrompts, share_prompts, shared_attention
from qerl_pl.quant.experts import Mixture, Replay, mixtures

ATTENTION = "packed"  # name under which ``_attention`` is registered with transformers
VARLEN_HEAD_DIM = 256  # widest heads that FlashAttention 2 supports
# In torch 2.11, varlen_attn supports fewer key heads than query heads without an argument; later versions need the
# argument ``enable_gqa``.
_SHARE_HEADS: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


@dataclass(frozen=True)
class Packed:
    """Packed rows: T tokens of B rows, one row after another."""

    tokens: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64, position of each token in its row."""
    rows: Tensor
    """[T] int64, row of each token; of a shared prompt's, the first row that has it."""
    starts: Tensor
    """[B + 1] int32, index of each row's first token, followed by T."""
    longest: int
    """Tokens of the longest row."""
    shared: SharedPrompts | None = None
    """Prompts that are shared by several rows; if given, ``starts`` has the boundaries of prompts and completions
    instead of rows. None: no prompts are shared."""


def pack(tokens: Tensor, lengths: Tensor) -> Packed:
    """Pack the first ``lengths`` [B] tokens of each row of [B, S] int64; 0 leaves a row out."""
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    inside = columns < lengths.unsqueeze(1)  # [B, S]
    starts = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    rows, positions = inside.nonzero(as_tuple=True)
    return Packed(tokens[inside], positions, rows, starts, int(lengths.max()))


def pack_for(tokens: Tensor, mask: Tensor, *, share: bool) -> tuple[Packed, Tensor]:
    """Pack the tokens that the model has to process to predict the N masked tokens.

    Args:
        tokens: [B, S] int64.
        mask: [B, S] bool, True for tokens to predict, never in column 0. A row's prompt is its tokens before these.
        share: whether equal prompts may be packed once for several rows.

    Returns:
        The packed rows, and for each masked token, in the order of ``mask.nonzero()``, the packed index of the token
        before it: [N].
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
    parts = layout.tokens, layout.positions, layout.rows, layout.starts, layout.longest, layout.shared
    return Packed(*parts), before


def packed_hidden_states(model: Callable[..., Any], packed: Packed, replay: Replay | None = None) -> Tensor:
    """Compute the last hidden states, [T, H], with a decoder that ``use_packed_attention`` has prepared. ``replay`` has
    experts [T, L, k] for the L mixtures of a model that ``use_replay`` has prepared."""
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


def use_packed_attention(model: PreTrainedModel) -> None:
    """Make a model's attention accept packed rows, given by ``cu_seq_lens_q``; calls without it use "sdpa"."""
    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation(ATTENTION)


def use_replay(model: PreTrainedModel) -> None:
    """Make a model's blocks accept experts to use, given by ``replay``; calls without it use those that the routers
    choose. The argument is one of the block's and not of its mixture, so that recomputation of the block gets it
    too."""
    found = [(block, mixture) for block in model.model.layers for mixture in mixtures(block)]

    def hand_over(mixture: Mixture, number: int, block: nn.Module, args: object, kwargs: dict[str, Any]) -> None:
        replay: Replay | None = kwargs.get("replay")
        mixture.replay = replay and replay.of_layer(number)

    for number, (block, mixture) in enumerate(found):
        block.register_forward_pre_hook(partial(hand_over, mixture, number), with_kwargs=True)


def describe_attention(config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> str:
    """Describe, for the log, which kernels compute attention over packed rows."""
    kernels = {
        "FlashAttention 2 (torch's varlen_attn)" if _has_varlen(device, dtype, width) else "padded rows in torch's SDPA"
        for width in head_dims(config)
    }
    return f"attention in training: {' and '.join(sorted(kernels))}"


def _has_varlen(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and head_dim <= VARLEN_HEAD_DIM


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: Tensor,
    longest: int,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Compute causal attention within each packed row, [T, heads, D].

    Args:
        query: [T, heads, D].
        key: [T, key heads, D]; query heads share key heads evenly.
        value: [T, key heads, D].
        starts: [B + 1] int32, see ``Packed``.
        longest: tokens of the longest row.
        scale: factor of the scores q k^T; None means D^-0.5.
        window: number of tokens that a token attends to, itself included; None means all tokens before it.
    """
    if _has_varlen(query.device, query.dtype, query.shape[-1]):
        seen = (-1 if window is None else window - 1, 0)
        output = varlen_attn(
            query, key, value, starts, starts, longest, longest, scale=scale, window_size=seen, **_SHARE_HEADS
        )
        assert isinstance(output, Tensor)
        return output
    return _padded_attention(query, key, value, starts, longest, scale, window)


def packed_attention_reference(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, scale: float | None = None, window: int | None = None
) -> Tensor:
    """Compute ``packed_attention`` row by row with full score matrices, as its definition."""
    outputs = []
    for start, end in pairwise(starts.tolist()):
        q, k, v = (part[start:end].transpose(0, 1) for part in (query, key, value))  # [heads, S, D]
        k, v = (part.repeat_interleave(len(q) // len(part), dim=0) for part in (k, v))
        scores = q @ k.transpose(1, 2) * (q.shape[-1] ** -0.5 if scale is None else scale)
        hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
        if window is not None:
            hidden |= torch.ones_like(hidden).tril(-window)
        outputs.append((scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs)


def _padded_attention(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, scale: float | None, window: int | None
) -> Tensor:
    lengths = starts.diff()
    inside = torch.arange(longest, device=starts.device) < lengths.unsqueeze(1)  # [B, S]

    def pad(packed: Tensor) -> Tensor:
        padded = packed.new_zeros(*inside.shape, *packed.shape[1:]).masked_scatter(inside[..., None, None], packed)
        return padded.transpose(1, 2)  # [B, heads, S, D]

    heads: dict[str, Any] = {"enable_gqa": True}
    if query.is_cuda:  # torch's kernel for wide heads on CUDA needs as many key heads as query heads
        heads, times = {}, query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(times, dim=1) for part in (key, value))
    band = None
    if window is not None and window < longest:
        band = inside.new_ones(longest, longest).tril().triu(1 - window)  # [S, S], True where a token is seen
    output = F.scaled_dot_product_attention(
        pad(query), pad(key), pad(value), attn_mask=band, is_causal=band is None, scale=scale, **heads
    )
    return output.transpose(1, 2)[inside]


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    shared_prompts: SharedPrompts | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Implement transformers' attention interface: inputs [1, heads, T, D], output [1, T, heads, D]."""
    if cu_seq_lens_q is None or max_length_q is None:
        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        kwargs |= {"scaling": scaling, "dropout": dropout, "sliding_window": sliding_window}
        return sdpa(module, query, key, value, attention_mask, **kwargs)
    if dropout:
        raise ValueError(f"attention_dropout is {dropout}; packed attention has none: set it to 0 in config.json")
    q, k, v = (part.squeeze(0).transpose(0, 1) for part in (query, key, value))  # [T, heads, D]
    if shared_prompts is None:
        attend = partial(packed_attention, q, k, v, cu_seq_lens_q, max_length_q, scale=scaling, window=sliding_window)
    else:
        attend = partial(shared_attention, q, k, v, cu_seq_lens_q, max_length_q, shared_prompts, scaling)
    return kept_whole(attend).unsqueeze(0), None
