"""Operators that compute the NVFP4 linears of vLLM on Hopper: native kernels for up to 2048 tokens; in passes with more
prompt tokens than that, the weight is dequantised to scratch memory and multiplied by cuBLAS.

The native kernels are in ``qerl_pl.kernels``. ``native_linear.py`` has the kernel class by which vLLM calls these
operators. This module imports vLLM, so the engine imports it only if the native kernels can run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
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
    return next(tokens for tokens in count(1) if not _fused_kernel(tokens, a, b))


def call(layer: Any, x: Tensor, bias: Tensor | None, *adapter: Any) -> Tensor:
    """Compute a linear for which native kernels were compiled, [..., K] -> [..., N].

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
    a: list[Tensor],
    b: list[Tensor],
    indices: Tensor | None,
    no_lora: Tensor | None,
) -> Tensor:
    """Compute an NVFP4 linear [T, K] bf16 -> [T, N] with native kernels or, where none fits the number of tokens, by
    ``dequantised_linear``; registered as an operator that is opaque to torch.compile.

    The linear's kernel also adds the adapter if this is supported and faster; otherwise ``kernels.lora.add_lora`` adds
    it afterwards.

    Args:
        x, weight, weight_scale, weight_scale_2, bias: as in ``nvfp4_decode.decode_linear``.
        next_weight: as in ``Native``.
        a: one [R, K] for each part of a fused linear, such as q, k and v; empty without an adapter.
        b: one [n, R] for each part, which has n outputs.
        indices: [T] or longer, int64: -1 for a token without the adapter.
        no_lora: [1] bool on the host: True if no token has the adapter.
    """
    weights = weight, weight_scale, weight_scale_2
    if indices is None or no_lora is None or no_lora.item():
        return _without_adapter(x, weights, bias, next_weight)
    adapter = lora_hopper.Adapter(a, b, indices)
    if multiply := _fused_kernel(len(x), adapter.a, adapter.b, next_weight):
        return multiply(x.contiguous(), *weights, bias, adapter=adapter)
    y = _without_adapter(x, weights, bias, next_weight)
    add_lora(y, x, *adapter)
    return y


def _without_adapter(
    x: Tensor, weights: tuple[Tensor, Tensor, Tensor], bias: Tensor | None, next_weight: Tensor | None
) -> Tensor:
    """Compute a linear without its adapter. ``weights`` are the weight and its two scales; all arguments are as in
    ``nvfp4_linear``."""
    if multiply := _base_kernel(len(x), weights[1].shape[1], x.shape[1], next_weight):
        return multiply(x, *weights, bias)
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


def _base_kernel(
    tokens: int, outputs: int, inputs: int, next_weight: Tensor | None = None
) -> Callable[..., Tensor] | None:
    """Choose this project's native kernel for a GEMM with an NVFP4 weight; None if no native kernel can run it."""
    if few := nvfp4_decode.choose_schedule(tokens, outputs, inputs):
        return partial(nvfp4_decode.decode_linear, schedule=few, next_weight=next_weight)
    more = nvfp4_batch.choose_schedule(tokens, outputs, inputs)
    return partial(nvfp4_batch.batch_linear, schedule=more) if more else None


def _fused_kernel(
    tokens: int, a: Sequence[Tensor], b: Sequence[Tensor], next_weight: Tensor | None = None
) -> Callable[..., Tensor] | None:
    """Choose a native kernel that also adds the LoRA adapter, which it gets as its argument ``adapter``. Return None if
    no native kernel can, or if adding the adapter after the GEMM is faster."""
    shape = tokens, sum(map(len, b)), a[0].shape[1]
    few = nvfp4_decode.choose_schedule(*shape)
    if few and lora_hopper.fits_adapter(a, b):
        return partial(nvfp4_decode.decode_linear, schedule=few, next_weight=next_weight)
    if few or tokens > lora_hopper.MOST_TOKENS or not (more := nvfp4_batch.choose_schedule(*shape, fuses_lora=True)):
        return None
    parts = lora_hopper.choose_schedule(tokens, a, b, nvfp4_batch.spare_sms(more, *shape))
    return partial(_batch_with_adapter, schedule=more, parts=parts) if parts else None


def _batch_with_adapter(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    global_scale: Tensor,
    bias: Tensor | None,
    *,
    adapter: lora_hopper.Adapter,
    schedule: nvfp4_batch.Schedule,
    parts: lora_hopper.Schedule,
) -> Tensor:
    """Compute a linear for a batch with its adapter, in two kernels that overlap; ``parts`` divides the work of the
    adapter's."""
    update = lora_hopper.Update(lora_hopper.shrink(x, adapter.a, adapter.indices, parts), adapter.b)
    return nvfp4_batch.batch_linear(x, weight, scales, global_scale, bias, schedule, update=update)


def _fake(x: Tensor, weight: Tensor, weight_scale: Tensor, *_: object) -> Tensor:
    # len(x) would make the number of tokens a constant in the graph
    return x.new_empty(x.shape[0], weight_scale.shape[1])


def _fake_row(x: Tensor, weight: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


direct_register_custom_op("nvfp4_linear", nvfp4_linear, mutates_args=[], fake_impl=_fake, target_lib=_LIBRARY)
direct_register_custom_op(
    "nvfp4_row_linear", dequantised_linear, mutates_args=[], fake_impl=_fake_row, target_lib=_LIBRARY
)
