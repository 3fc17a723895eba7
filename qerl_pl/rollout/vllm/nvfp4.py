"""Operators that compute the NVFP4 linears of vLLM on Hopper: native kernels for up to 2048 tokens; in passes with more
prompt tokens than that, the weight is dequantised to scratch memory and multiplied by cuBLAS.

The native kernels are in ``qerl_pl.kernels``. ``native_linear.py`` has the kernel class by which vLLM calls these
operators. This module imports vLLM, so the engine imports it only if the native kernels can run.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import Library
from torch.nn import functional as F
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.utils.torch_utils import direct_register_custom_op

from qerl_pl.kernels import hopper, lora_hopper, nvfp4_batch, nvfp4_decode
from qerl_pl.kernels.lora import add_lora
from qerl_pl.quant.formats import PackedWeight
from qerl_pl.quant.nvfp4 import dequantize
from qerl_pl.rollout.vllm.cuda import OneAdapterKernels, slots

_LIBRARY = Library("qerl_pl", "FRAGMENT")  # torch unregisters a Library's operators when the Library object is deleted
_apply_with_adapter = BaseLinearLayerWithLoRA._apply_sync


class Native(NamedTuple):
    """Mark of a linear of vLLM that the native kernels compute, its attribute ``native``; the loader adds what the
    linear has to know of the other ones.

    It is a tuple, because torch would register a weight that is an attribute of the linear itself as its parameter.
    """

    next_weight: Tensor | None = None
    """Weight of the linear that is computed after this one, or None; see ``nvfp4_decode.decode_linear``."""
    gated: bool = False
    """Whether this is the fused gate and up of an MLP, without a bias, and its operator returns silu(gate) * up."""


@cache
def prepare(outputs: int, inputs: int, device: torch.device) -> None:
    """Load the native kernels for linears of one shape and for their adapters, compiled if necessary; cached, as all
    decoder blocks have linears of the same shapes."""
    hopper.prepare(kernels_for(outputs, inputs), device)


def kernels_for(outputs: int, inputs: int) -> list[hopper.Kernel]:
    """List the native kernels for linears of one shape and for their adapters."""
    linears = *nvfp4_decode.kernels_for(outputs, inputs), *nvfp4_batch.kernels_for(outputs, inputs)
    return [*linears, *lora_hopper.all_kernels()]


def apply_with_adapter(self: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute a linear with an adapter, [..., K] -> [..., N]; replaces ``_apply_sync`` of vLLM's LoRA layers."""
    layer = self.base_layer
    if not hasattr(layer, "native") or not isinstance(self.punica_wrapper, OneAdapterKernels):
        return _apply_with_adapter(self, x, bias)
    return call(layer, x, bias, slots(self.lora_a_stacked), slots(self.lora_b_stacked), *self.punica_wrapper.tokens)


def fewest_unfused(linear: Any) -> int:
    """Return the smallest number of tokens for which a linear's LoRA adapter is added by separate kernels and not by
    this project's native GEMM."""
    a, b = slots(linear.lora_a_stacked), slots(linear.lora_b_stacked)
    shape, fits = (sum(map(len, b)), a[0].shape[1]), lora_hopper.fits_adapter(a, b)

    def is_fused(tokens: int) -> bool:
        return fits and bool(nvfp4_decode.choose_schedule(tokens, *shape) or _fused_batch(tokens, a, b))

    return next(tokens for tokens in count(1) if not is_fused(tokens))


def call(layer: Any, x: Tensor, bias: Tensor | None, *adapter: Any) -> Tensor:
    """Compute a linear for which native kernels were compiled, [..., K] -> [..., N], or [..., N / 2] if it is gated.

    Args:
        layer: the linear, with the attribute ``native``.
        x: [..., K].
        bias: the linear's bias, or None.
        adapter: the arguments a, b, indices and no_lora of ``nvfp4_linear``, or nothing.
    """
    weights = layer.weight, layer.weight_scale, layer.weight_scale_2
    y = torch.ops.qerl_pl.nvfp4_linear(
        x.reshape(-1, x.shape[-1]), *weights, bias, *layer.native, *(adapter or ([], [], None, None))
    )
    return y.view(*x.shape[:-1], y.shape[-1])


def nvfp4_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_scale_2: Tensor,
    bias: Tensor | None,
    next_weight: Tensor | None,
    gated: bool,
    a: list[Tensor],
    b: list[Tensor],
    indices: Tensor | None,
    no_lora: Tensor | None,
) -> Tensor:
    """Compute an NVFP4 linear [T, K] bf16 -> [T, N], or [T, N / 2] if it is gated, with native kernels or, where none
    fits the number of tokens, by ``dequantised_linear``; registered as an operator that is opaque to torch.compile.

    The linear's kernel also adds the adapter if this is supported and faster; otherwise ``kernels.lora.add_lora`` adds
    it afterwards. The decode GEMM also computes silu(gate) * up, so that no other kernel runs between it and the GEMM
    of ``down``; after other kernels, vLLM's kernel does, and rounds in the same places.

    Args:
        x, weight, weight_scale, weight_scale_2, bias: as in ``nvfp4_decode.decode_linear``.
        next_weight, gated: as in ``Native``.
        a: one [R, K] for each part of a fused linear, such as q, k and v; empty without an adapter.
        b: one [n, R] for each part, which has n outputs.
        indices: [T] or longer, int64: -1 for a token without the adapter.
        no_lora: [1] bool on the host: True if no token has the adapter.
    """
    weights = weight, weight_scale, weight_scale_2, bias
    adapter = None if indices is None or no_lora is None or no_lora.item() else lora_hopper.Adapter(a, b, indices)
    shape = len(x), weight_scale.shape[1], x.shape[1]
    few = nvfp4_decode.choose_schedule(*shape)
    if few and (not adapter or lora_hopper.fits_adapter(a, b)):
        return nvfp4_decode.decode_linear(x, *weights, few, adapter=adapter, next_weight=next_weight, gated=gated)
    if adapter and (schedules := _fused_batch(len(x), a, b)):
        y = _batch_with_adapter(x.contiguous(), *weights, adapter, *schedules)
    else:
        y = _without_adapter(x, *weights)
        if adapter:
            add_lora(y, x, *adapter)
    return silu_and_mul(y) if gated else y


def silu_and_mul(y: Tensor) -> Tensor:
    """Compute silu(gate) * up from [T, N] with gate in the first half of the columns, [T, N / 2]."""
    product = y.new_empty(len(y), y.shape[1] // 2)
    torch.ops._C.silu_and_mul(product, y)
    return product


def _without_adapter(
    x: Tensor, weight: Tensor, weight_scale: Tensor, weight_scale_2: Tensor, bias: Tensor | None
) -> Tensor:
    """Compute a linear without its adapter, [T, N]; all arguments are as in ``nvfp4_linear``."""
    weights, shape = (weight, weight_scale, weight_scale_2), (len(x), weight_scale.shape[1], x.shape[1])
    if few := nvfp4_decode.choose_schedule(*shape):
        return nvfp4_decode.decode_linear(x, *weights, bias, few)
    if more := nvfp4_batch.choose_schedule(*shape):
        return nvfp4_batch.batch_linear(x, *weights, bias, more)
    # ``humming_bias`` swaps the bias between tile order and row order, in both directions.
    return dequantised_linear(x, *weights, None if bias is None else nvfp4_decode.humming_bias(bias))


def dequantised_linear(
    x: Tensor, weight: Tensor, weight_scale: Tensor, weight_scale_2: Tensor, bias: Tensor | None
) -> Tensor:
    """Compute a linear [T, K] bf16 -> [T, N]: dequantise the weight to scratch memory of 2 N K bytes, and multiply by
    cuBLAS.

    cuBLAS adds in a fixed order, so equal inputs give equal bits.

    Args:
        x: [T, K].
        weight: codes in tile order, [K / 16, 2 N] int32, or in row order, [N, K / 2] uint8.
        weight_scale: e4m3 in the same order, [K / 16, N] or [N, K / 16].
        weight_scale_2: [1] fp32, tensor scale.
        bias: [N] in row order, or None.
    """
    packed = PackedWeight(weight, weight_scale.view(torch.uint8), weight_scale_2)
    return F.linear(x, dequantize(packed, x.dtype), bias)


def _fused_batch(
    tokens: int, a: Sequence[Tensor], b: Sequence[Tensor]
) -> tuple[nvfp4_batch.Schedule, lora_hopper.Schedule] | None:
    """Choose the schedules by which the batch GEMM computes a linear and its adapter together. Return None if it
    cannot, or if adding the adapter after the GEMM is faster."""
    shape = tokens, sum(map(len, b)), a[0].shape[1]
    if tokens > lora_hopper.MOST_TOKENS or not (more := nvfp4_batch.choose_schedule(*shape, fuses_lora=True)):
        return None
    parts = lora_hopper.choose_schedule(tokens, a, b, nvfp4_batch.spare_sms(more, *shape))
    return (more, parts) if parts else None


def _batch_with_adapter(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    global_scale: Tensor,
    bias: Tensor | None,
    adapter: lora_hopper.Adapter,
    schedule: nvfp4_batch.Schedule,
    parts: lora_hopper.Schedule,
) -> Tensor:
    """Compute a linear for a batch with its adapter, in two kernels that overlap; ``parts`` divides the work of the
    adapter's."""
    update = lora_hopper.Update(lora_hopper.shrink(x, adapter.a, adapter.indices, parts), adapter.b)
    return nvfp4_batch.batch_linear(x, weight, scales, global_scale, bias, schedule, update=update)


def _fake(x: Tensor, weight: Tensor, weight_scale: Tensor, *more: Any) -> Tensor:
    _scale, _bias, _next_weight, gated, *_adapter = more
    # len(x) would make the number of tokens a constant in the graph
    return x.new_empty(x.shape[0], weight_scale.shape[1] // (2 if gated else 1))


def _fake_row(x: Tensor, weight: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


direct_register_custom_op("nvfp4_linear", nvfp4_linear, mutates_args=[], fake_impl=_fake, target_lib=_LIBRARY)
direct_register_custom_op(
    "nvfp4_row_linear", dequantised_linear, mutates_args=[], fake_impl=_fake_row, target_lib=_LIBRARY
)
