"""Attention over packed rows, that is, sequences of different lengths that are concatenated without padding. The tokens
of a row attend only to tokens of the same row.

On CUDA in bf16 and fp16, torch's varlen kernel (FlashAttention 2) computes attention. For other dtypes and devices, and
for heads wider than this kernel supports, queries, keys and values are padded and given to torch's
scaled_dot_product_attention, whose output is packed again.

If several completions have the same prompt, the packed sequence may hold the prompt only once (``policy.packing``).
FlashAttention is then called twice: for attention within each prompt and within each completion, and for attention of
completions to their prompts. The two outputs are merged by their log-sum-exps. FlashAttention's backward is also called
twice. Both calls get the merged output and log-sum-exps, and each returns the exact gradients of one of the two kinds
of attention.

Two faster kernels were tried on an H200 and are not used. cuDNN's kernel, as called by torch 2.11, returns wrong
gradients for packed rows of unequal lengths and takes 0.1 s for every new set of lengths. FlashAttention 3, in the form
that vLLM ships, has no backward.
"""

from functools import partial
from inspect import signature
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qerl_pl.model.layers import head_dims
from qerl_pl.policy.kept import kept_whole
from qerl_pl.policy.packing import SharedPrompts

ATTENTION = "packed"  # name under which ``_attention`` is registered with transformers
VARLEN_HEAD_DIM = 256  # widest heads that FlashAttention 2 supports
# In torch 2.11, varlen_attn supports fewer key heads than query heads without an argument; later versions need the
# argument ``enable_gqa``.
_SHARE_HEADS: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


def use_packed_attention(model: PreTrainedModel) -> None:
    """Make a transformers model accept packed rows, which are concatenated without padding. The caller passes the rows'
    boundaries, [B + 1] int32 for B rows, to the model's forward as ``cu_seq_lens_q``; without them the model uses
    transformers' "sdpa" attention."""
    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation(ATTENTION)


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
    """Compute causal attention within each of B packed rows of T tokens together. Returns [T, heads, D].

    Args:
        query: [T, heads, D].
        key, value: [T, key heads, D]; the number of heads is a multiple of the number of key heads.
        starts: [B + 1] int32, index of each row's first token, followed by T.
        longest: number of tokens of the longest row.
        scale: factor of the scores q k^T; None means D^-0.5.
        window: number of tokens that a token attends to, itself included; None means all earlier tokens of its row.
    """
    if _has_varlen(query.device, query.dtype, query.shape[-1]):
        seen = (-1 if window is None else window - 1, 0)
        output = varlen_attn(
            query, key, value, starts, starts, longest, longest, scale=scale, window_size=seen, **_SHARE_HEADS
        )
        assert isinstance(output, Tensor)
        return output
    return _padded_attention(query, key, value, starts, longest, scale, window)


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
    """Compute attention as transformers' ``AttentionInterface`` prescribes: [1, heads, T, D] to [1, T, heads, D]."""
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


def shared_attention(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, longest: int, shared: SharedPrompts, scale: float | None
) -> Tensor:
    """Compute causal attention of T packed tokens of a sequence that holds each prompt once for all its completions. A
    completion's tokens attend to its prompt and to the completion's earlier tokens. Returns [T, heads, D].

    ``query``, ``key``, ``value`` and ``scale`` are those of ``packed_attention``; ``starts``, ``longest`` and
    ``shared`` say where prompts and completions begin and end (fields of ``packing.Packed``). FlashAttention 2 is used
    on a GPU in 16 bits, ``shared_attention_reference`` otherwise.
    """
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        return _SharedAttention.apply(query, key, value, starts, longest, shared, scale)
    return shared_attention_reference(query, key, value, starts, shared, scale)


def shared_attention_reference(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, shared: SharedPrompts, scale: float | None = None
) -> Tensor:
    """Compute the result of ``shared_attention`` with a full score matrix [T, T]."""
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
    """Autograd node that merges two FlashAttention calls: attention within each prompt and each completion, and
    attention of completions to their prompts."""

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
