"""Gated delta nets (layers with a recurrent state) of vLLM on a CPU in fp32, computed by functions of transformers,
because vLLM's CPU kernels for these layers support bf16 only."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name

Operator = Callable[[Tensor, Tensor, Tensor, Tensor, LayerNameType], None]


def with_fp32(bf16: Operator) -> Operator:
    """Return a replacement of vLLM's operator ``bf16`` for gated delta nets that computes other dtypes by functions of
    transformers."""

    def cpu_gdn_attention_core(
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        core_attn_out: torch.Tensor,
        layer_name: LayerNameType,
    ) -> None:
        if mixed_qkv.dtype == torch.bfloat16:
            bf16(mixed_qkv, b, a, core_attn_out, layer_name)
            return
        context: Any = get_forward_context()
        name = _resolve_layer_name(layer_name)
        if context.attn_metadata is not None:  # without metadata, vLLM only measures how much memory the model takes
            layer = context.no_compile_layers[name]
            _compute(layer, context.attn_metadata[layer.prefix], mixed_qkv, b, a, core_attn_out)

    return cpu_gdn_attention_core


def _compute(layer: Any, batch: Any, mixed: Tensor, b: Tensor, a: Tensor, outputs: Tensor) -> None:
    """Compute the convolution and the recurrence of a gated delta net for T new tokens, and update the requests'
    states.

    Args:
        layer: vLLM's layer, whose ``kv_cache`` holds, by slot, the last inputs of the convolution, and fp32 recurrent
            states, whose memory is used as [slots, value heads, key width, value width] although their shape has the
            two widths exchanged.
        batch: vLLM's ``GDNAttentionMetadata``: one token of each decoding request comes first, then the prompts.
        mixed: [T, channels], the projected queries, keys and values.
        b: [T, value heads]; its sigmoid is the step size of the recurrence.
        a: [T, value heads], from which the decay of the recurrent state is computed.
        outputs: [T, value heads, value width], written in place.
    """
    assert batch.num_spec_decodes == 0, "speculative decoding is not supported"
    convs, states = layer.kv_cache
    # the convolution's last inputs, [slots, channels, width of the convolution - 1]
    convs = convs if is_conv_state_dim_first() else convs.transpose(1, 2)
    states = states.view(*states.shape[:2], layer.head_k_dim, layer.head_v_dim)
    starts = batch.non_spec_query_start_loc.tolist()
    slots = batch.non_spec_state_indices_tensor.tolist()
    decodes = batch.num_decodes
    rows = [(decodes, slots[:decodes], None)] if decodes else []
    known = [] if batch.has_initial_state is None else batch.has_initial_state.tolist()
    for row in range(decodes, decodes + batch.num_prefills):
        rows.append((starts[row + 1] - starts[row], [slots[row]], known[row]))
    first = 0
    for count, row_slots, continues in rows:
        part = slice(first, first + count)
        first += count
        # inputs of shape [sequences, tokens, ...]: one token of each decoding request, or all tokens of one prompt
        new = [tensor[part].unsqueeze(1 if continues is None else 0) for tensor in (mixed, b, a)]
        if continues is False:
            convs[row_slots], states[row_slots] = 0, 0
        computed, convs[row_slots], states[row_slots] = _rows(layer, *new, convs[row_slots], states[row_slots])
        outputs[part] = computed.flatten(0, 1)


def _rows(
    layer: Any, mixed: Tensor, b: Tensor, a: Tensor, conv: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute B sequences of S new tokens each, which continue from the given states. Returns outputs [B, S, value
    heads, value width], and the states of convolution and recurrence after the last new token."""
    weight = layer.conv1d.weight
    # the convolution's inputs, [B, channels, width of the convolution - 1 + S]
    inputs = torch.cat([conv, mixed.transpose(1, 2)], dim=2)
    convolved = F.conv1d(inputs, weight, layer.conv1d.bias, groups=weight.shape[0])
    assert layer.activation == "silu", layer.activation
    parts = F.silu(convolved).transpose(1, 2).split([layer.key_dim, layer.key_dim, layer.value_dim], dim=2)
    widths = layer.head_k_dim, layer.head_k_dim, layer.head_v_dim
    query, key, value = (part.unflatten(2, (-1, width)) for part, width in zip(parts, widths, strict=True))
    repeats = layer.num_v_heads // layer.num_k_heads
    one_token = mixed.shape[1] == 1
    rule = qwen3_5.torch_recurrent_gated_delta_rule if one_token else qwen3_5.torch_chunk_gated_delta_rule
    outputs, new_state = rule(
        query.repeat_interleave(repeats, dim=2),
        key.repeat_interleave(repeats, dim=2),
        value,
        g=-layer.A_log.float().exp() * F.softplus(a.float() + layer.dt_bias),
        beta=b.sigmoid(),
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    assert new_state is not None
    return outputs, inputs[:, :, -conv.shape[2] :], new_state
