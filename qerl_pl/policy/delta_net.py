"""Gated delta nets (arXiv 2412.06464), layers with a recurrent state, on packed rows: sequences that are concatenated
without padding. The state of each row starts at zero.

transformers' implementation in torch ignores where packed rows end, so a row would continue from the state of the
previous row. Here, rows are padded on the right for the convolution and the recurrence, and packed again afterwards.
Both operations are causal, so padding does not change the results of the tokens before it. Rows of similar lengths are
padded and computed together, as a group in which less than half of the chunks of 64 tokens are padding. Backward
recomputes convolution and recurrence one group at a time. So their intermediate results, which are 17 times as large as
their inputs, are never in memory for all tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5

from qerl_pl.policy.kept import kept_whole
from qerl_pl.policy.lora import apply_linears

GROUP_TOKENS = 4096
"""Largest number of tokens, padding included, of a group of rows that are padded and computed together. A longer row is
a group by itself."""
CHUNK = 64
"""Number of tokens to a multiple of which transformers' code pads rows."""


class Groups:
    """Division of the rows of one packed micro-batch into groups of rows of similar lengths; the rows of a group are
    padded and computed together. All gated delta nets of a model share one such object, so the lengths are copied from
    the GPU only once per forward pass."""

    def __init__(self) -> None:
        self._starts: Tensor | None = None
        self.indices: list[Tensor] = []
        """Indices, in the packed batch, of the tokens of each group, [tokens of the group] int64 per group."""
        self.inside: list[Tensor] = []
        """Mask [B, S] bool for each group, whose B rows are padded to S tokens: True for tokens of the rows."""
        self.inverse = torch.empty(0)
        """[T] int64, index of each packed token among the tokens of all groups."""

    def of(self, starts: Tensor) -> Groups:
        """Divide packed rows into groups of similar lengths (``grouped``), store the groups in this object, and return
        the object. ``starts`` [B + 1] int32 has the index of each row's first token, followed by the number of tokens
        of all rows. If the previous call had the same tensor object as its argument, nothing is computed again."""
        if self._starts is starts:
            return self
        first, lengths = starts.tolist(), starts.diff().tolist()
        options: Any = {"device": starts.device}
        self.indices, self.inside = [], []
        for rows in grouped(lengths):
            sizes = [lengths[row] for row in rows]
            self.indices.append(torch.cat([torch.arange(first[row], first[row + 1]) for row in rows]).to(**options))
            self.inside.append((torch.arange(max(sizes)) < torch.tensor(sizes).unsqueeze(1)).to(**options))
        self.inverse = torch.cat(self.indices).argsort()
        self._starts = starts
        return self


def grouped(lengths: Sequence[int]) -> list[list[int]]:
    """Divide rows of the given lengths, in tokens, into groups of similar lengths, and return the row indices of each
    group, longest rows first. Lengths are compared in chunks of 64 tokens, to a multiple of which the recurrence pads
    rows: the shortest row of a group has more than half as many chunks as its longest row, and a group of several rows
    has at most ``GROUP_TOKENS`` tokens, padding included. Rows of length 0 are left out."""
    groups: list[list[int]] = []
    chunks = [ceil(length / CHUNK) for length in lengths]
    for row in sorted((row for row, length in enumerate(lengths) if length), key=lambda row: -lengths[row]):
        longest = chunks[groups[-1][0]] if groups else 0
        fits = groups and (len(groups[-1]) + 1) * longest * CHUNK <= GROUP_TOKENS
        if fits and 2 * chunks[row] > longest:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def use_packed_delta_nets(model: PreTrainedModel) -> None:
    """Make the gated delta nets of a transformers model accept packed rows, whose boundaries, [B + 1] int32 for B rows,
    are passed to the model's forward as ``cu_seq_lens_q``. Without the boundaries, the layers compute what they compute
    in transformers."""
    groups = Groups()
    for module in model.modules():
        known: Any = module
        if hasattr(module, "in_proj_qkv"):
            known.forward = partial(_forward, known, known.forward, groups)


def _forward(
    module: Any,
    plain: Callable[..., Tensor],
    groups: Groups,
    hidden_states: Tensor,
    *args: Any,
    cu_seq_lens_q: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    if cu_seq_lens_q is None:
        return plain(hidden_states, *args, **kwargs)
    mixed, z = apply_linears(hidden_states, [module.in_proj_qkv, module.in_proj_z])
    b, a = module.in_proj_b(hidden_states), module.in_proj_a(hidden_states)
    scan = partial(_scan_groups, module, mixed.squeeze(0), b.squeeze(0), a.squeeze(0), groups.of(cu_seq_lens_q))
    outputs = kept_whole(scan)  # [T, value heads, D]
    gated = module.norm(outputs.flatten(0, 1), z.reshape(-1, module.head_v_dim))
    return module.out_proj(gated.view(*hidden_states.shape[:-1], -1))


def _scan_groups(module: Any, mixed: Tensor, b: Tensor, a: Tensor, groups: Groups) -> Tensor:
    outputs = []
    for index, inside in zip(groups.indices, groups.inside, strict=True):
        scan = partial(_scan, module, inside=inside)
        inputs = [tensor.index_select(0, index) for tensor in (mixed, b, a)]
        if torch.is_grad_enabled():
            outputs.append(checkpoint(scan, *inputs, use_reentrant=False, preserve_rng_state=False))
        else:
            outputs.append(scan(*inputs))
    return torch.cat(outputs).index_select(0, groups.inverse)


def _scan(module: Any, mixed: Tensor, b: Tensor, a: Tensor, *, inside: Tensor) -> Tensor:
    """Compute the convolution and the recurrence of a gated delta net for B rows of similar lengths, T tokens in all,
    padded to S. Returns [T, value heads, D].

    Args:
        module: the gated delta net.
        mixed: [T, C], the projected queries, keys and values, concatenated.
        b: [T, value heads]; its sigmoid is the step size of the recurrence.
        a: [T, value heads], from which the decay of the recurrent state is computed.
        inside: [B, S] bool, True for tokens and False for padding.
    """

    def pad(packed: Tensor) -> Tensor:
        return packed.new_zeros(*inside.shape, packed.shape[-1]).masked_scatter(inside.unsqueeze(-1), packed)

    conv: nn.Conv1d = module.conv1d
    convolved = qwen3_5.causal_conv1d_fn(
        pad(mixed).transpose(1, 2), conv.weight.squeeze(1), conv.bias, activation=module.activation
    )
    widths = (module.key_dim, module.key_dim, module.value_dim)
    heads = module.head_k_dim, module.head_k_dim, module.head_v_dim
    parts = zip(convolved.transpose(1, 2).split(widths, dim=-1), heads, strict=True)
    query, key, value = (part.unflatten(-1, (-1, width)) for part, width in parts)
    repeats = module.num_v_heads // module.num_k_heads
    decay = -module.A_log.float().exp() * F.softplus(pad(a).float() + module.dt_bias)
    outputs, _ = qwen3_5.torch_chunk_gated_delta_rule(
        query.repeat_interleave(repeats, dim=2),
        key.repeat_interleave(repeats, dim=2),
        value,
        g=decay,
        beta=pad(b).sigmoid(),
        use_qk_l2norm_in_kernel=True,
    )
    return outputs[inside]
