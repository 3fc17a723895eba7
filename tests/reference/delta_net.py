"""A gated delta net layer of Qwen3.5, token by token, as its equations say (arXiv 2412.06464, eq. 10)."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def delta_net(layer: Any, hidden: Tensor) -> Tensor:
    """Compute a gated delta net layer's output [T, H] on the hidden states [T, H] of one row of T tokens.

    For token t, each head computes a query q_t and a key k_t of size D, a value v_t, a decay exp(g_t) and a factor
    beta_t. Its state, a matrix that is 0 before the first token, becomes S_t = exp(g_t) S_(t-1) + k_t (beta_t (v_t -
    exp(g_t) S_(t-1)^T k_t))^T, and its output is S_t^T q_t / sqrt(D).
    """
    mixed, width = layer.in_proj_qkv(hidden), layer.conv_kernel_size
    before = F.pad(mixed, (0, 0, width - 1, 0))  # a row begins with nothing before it
    taps = layer.conv1d.weight.squeeze(1)  # [C, width]
    mixed = torch.stack([F.silu((before[t : t + width].T * taps).sum(1)) for t in range(len(hidden))])
    query, key, value = mixed.split([layer.key_dim, layer.key_dim, layer.value_dim], dim=1)
    query, key = (part.unflatten(1, (-1, layer.head_k_dim)) for part in (query, key))
    query, key = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in (query, key))
    value, z = (part.unflatten(1, (-1, layer.head_v_dim)) for part in (value, layer.in_proj_z(hidden)))
    beta = layer.in_proj_b(hidden).sigmoid()
    decay = torch.exp(-layer.A_log.exp() * F.softplus(layer.in_proj_a(hidden) + layer.dt_bias))
    states = [hidden.new_zeros(layer.head_k_dim, layer.head_v_dim)] * layer.num_v_heads
    rows = []
    for t in range(len(hidden)):
        heads = []
        for head in range(layer.num_v_heads):
            group = head // (layer.num_v_heads // layer.num_k_heads)
            q, k, v = query[t, group], key[t, group], value[t, head]
            state = decay[t, head] * states[head]
            state = state + torch.outer(k, beta[t, head] * (v - state.T @ k))
            heads.append((state, state.T @ q * layer.head_k_dim**-0.5))
        states = [state for state, _ in heads]
        outputs = torch.stack([output for _, output in heads])
        normal = outputs * torch.rsqrt(outputs.square().mean(-1, keepdim=True) + layer.layer_norm_epsilon)
        rows.append((layer.norm.weight * normal * F.silu(z[t])).flatten())
    return layer.out_proj(torch.stack(rows))
