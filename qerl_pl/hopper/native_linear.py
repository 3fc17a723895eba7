"""NVFP4 linear layers of vLLM on Hopper, computed by this project's CUDA kernels ("native kernels"): the class that
vLLM uses for them, and the torch operators that they call.

Native kernels compute forward passes of up to 2048 tokens. In passes with more tokens, each weight is dequantised to
scratch memory and multiplied by cuBLAS. Native kernels and cuBLAS add partial sums in a fixed order, so equal inputs
give equal bits.

Letters: T tokens, K inputs, N outputs, R rank of a LoRA adapter.
"""

from collections.abc import Sequence
from functools import cache
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.library import Library
from torch.nn import functional as F
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearKernel, NvFp4LinearLayerConfig
from vllm.utils.torch_utils import direct_register_custom_op

from qerl_pl.hopper import driver, lora_hopper, nvfp4_batch, nvfp4_decode, one_copy
from qerl_pl.hopper.tile_order import fits, to_tile_order
from qerl_pl.kernels.lora import add_lora
from qerl_pl.quant.formats import PackedWeight
from qerl_pl.quant.nvfp4 import dequantize
from qerl_pl.rollout.vllm.cuda import OneAdapterKernels, slots

_LIBRARY = Library("qerl_pl", "FRAGMENT")  # torch unregisters a Library's operators when the Library object is deleted
_apply_with_adapter = BaseLinearLayerWithLoRA._apply_sync


class Native(NamedTuple):
    """Value of the attribute ``native``, which marks linear layers of vLLM that this project's CUDA kernels compute.
    The weight of the next layer, which a layer's kernel prefetches, is in this tuple, because torch would register it
    as a parameter of the layer if it were an attribute of the layer itself."""

    next_weight: Tensor | None = None
    """Weight of the linear layer that is computed next, or None; the decode GEMM prefetches it."""
    gated: bool = False
    """Whether the layer is the fused gate and up of an MLP, without a bias, whose operator returns silu(gate) * up."""

    def fewest_unfused(self, linear: Any) -> int:
        """Return the smallest number of tokens for which a linear layer's LoRA adapter is added by separate kernels
        after the GEMM, because that is faster or because the GEMM kernels cannot add it."""
        a, b = slots(linear.lora_a_stacked), slots(linear.lora_b_stacked)
        shape, takes = (sum(map(len, b)), a[0].shape[1]), lora_hopper.fits_adapter(a, b)

        def is_fused(tokens: int) -> bool:
            return takes and bool(nvfp4_decode.choose_schedule(tokens, *shape) or _fused_batch(tokens, a, b))

        return next(tokens for tokens in count(1) if not is_fused(tokens))


class NativeLinear(NvFp4LinearKernel):
    """Kernel class for vLLM that computes NVFP4 linear layers with 16-bit activations. After loading, a weight is
    rearranged to tile order if the CUDA kernels support its shape; otherwise, it keeps the layout of checkpoints and is
    dequantised in every call."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None  # the engine has asked ``lacks``

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Convert a layer's ``weight`` [N, K / 2] uint8, ``weight_scale`` [N, K / 16] e4m3 and ``weight_global_scale``
        [] fp32 to the layout that this project's kernels read. If the trainer's tensors have the same bits, the layer
        uses these."""
        one_copy.give(layer)
        codes, scales, factor = layer.weight.data, layer.weight_scale.data, layer.weight_global_scale.data.reshape(1)
        packed = PackedWeight(codes, scales.view(torch.uint8), factor)
        del layer.weight_global_scale
        if fits([(len(codes), 2 * codes.shape[1])]):
            packed = to_tile_order(packed)
            if (bias := getattr(layer, "bias", None)) is not None:
                bias.data = nvfp4_decode.humming_bias(bias.data)
            prepare(len(codes), 2 * codes.shape[1], codes.device)
            layer.native = Native()
        layer.weight = _frozen(packed.codes)
        layer.weight_scale = _frozen(packed.block_scale.view(scales.dtype))
        layer.weight_scale_2 = _frozen(factor)
        one_copy.adopt(layer)

    def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute a linear layer without an adapter, [..., K] -> [..., N]."""
        if hasattr(layer, "native"):
            return call(layer, x, bias)
        weights = layer.weight, layer.weight_scale, layer.weight_scale_2
        y = torch.ops.qerl_pl.nvfp4_row_linear(x.reshape(-1, x.shape[-1]), *weights, bias)
        return y.view(*x.shape[:-1], y.shape[-1])


def make() -> NativeLinear:
    """Make the kernel object of one linear."""
    return NativeLinear(NvFp4LinearLayerConfig())


@cache
def prepare(outputs: int, inputs: int, device: torch.device) -> None:
    """Load, and compile if need be, the CUDA kernels for linear layers of one shape and their LoRA adapters."""
    driver.prepare(kernels_for(outputs, inputs), device)


def kernels_for(outputs: int, inputs: int) -> list[driver.Kernel]:
    """List this project's CUDA kernels for linear layers of one shape and for their adapters."""
    linears = *nvfp4_decode.kernels_for(outputs, inputs), *nvfp4_batch.kernels_for(outputs, inputs)
    return [*linears, *lora_hopper.all_kernels()]


def apply_with_adapter(self: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute a linear layer and its LoRA adapter, [..., K] -> [..., N], in place of vLLM's ``_apply_sync``."""
    layer = self.base_layer
    if not hasattr(layer, "native") or not isinstance(self.punica_wrapper, OneAdapterKernels):
        return _apply_with_adapter(self, x, bias)
    return call(layer, x, bias, slots(self.lora_a_stacked), slots(self.lora_b_stacked), *self.punica_wrapper.tokens)


def call(layer: Any, x: Tensor, bias: Tensor | None, *adapter: Any) -> Tensor:
    """Compute a linear layer of vLLM with the attribute ``native``, [..., K] -> [..., N], or [..., N / 2] if it is
    gated. ``adapter`` is empty, or has the arguments a, b, indices and no_lora of ``nvfp4_linear``."""
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
    """Compute an NVFP4 linear layer and, if given, its LoRA adapter: [T, K] bf16 -> [T, N], or [T, N / 2] if it is
    gated. This is the body of a custom operator that torch.compile does not trace.

    For few tokens, the product is computed by the decode GEMM (``nvfp4_decode``), for up to 2048 by the batch GEMM
    (``nvfp4_batch``), and for more by cuBLAS with a dequantised weight. Both GEMMs also add the adapter if this is
    faster than separate kernels. If ``gated``, the decode GEMM also computes silu(gate) * up, so that no kernel runs
    between it and the GEMM of ``down``; otherwise vLLM's kernel does, with the same roundings.

    Args:
        x, weight, weight_scale, weight_scale_2, bias, next_weight: the arguments ``x``, ``weight``, ``scales``,
            ``global_scale``, ``bias`` and ``next_weight`` of ``nvfp4_decode.decode_linear``.
        gated: whether the layer is the fused gate and up of an MLP.
        a, b: LoRA's matrices, one A [R, K] and one B [n, R] for each part of a fused layer; empty without an adapter.
        indices: [T] or longer, int64: -1 for a token without the adapter.
        no_lora: [1] bool on the host: True if no token has the adapter.
    """
    weights = weight, weight_scale, weight_scale_2, bias
    adapter = None if indices is None or no_lora is None or no_lora.item() else lora_hopper.Adapter(a, b, indices)
    few = nvfp4_decode.choose_schedule(len(x), weight_scale.shape[1], x.shape[1])
    if few and (not adapter or lora_hopper.fits_adapter(a, b)):
        return nvfp4_decode.decode_linear(x, *weights, few, adapter=adapter, next_weight=next_weight, gated=gated)
    if adapter and (schedules := _fused_batch(len(x), a, b)):
        x, (schedule, parts) = x.contiguous(), schedules  # two kernels that overlap
        update = lora_hopper.Update(lora_hopper.shrink(x, a, adapter.indices, parts), b)
        y = nvfp4_batch.batch_linear(x, *weights, schedule, update=update)
    else:
        y = _without_adapter(x, *weights)
        if adapter:
            add_lora(y, x, *adapter)
    return silu_and_mul(y) if gated else y


def silu_and_mul(y: Tensor) -> Tensor:
    """Compute silu(gate) * up, [T, N / 2], from [T, N] with gate in the first half of the columns."""
    product = y.new_empty(len(y), y.shape[1] // 2)
    torch.ops._C.silu_and_mul(product, y)
    return product


def _without_adapter(
    x: Tensor, weight: Tensor, weight_scale: Tensor, weight_scale_2: Tensor, bias: Tensor | None
) -> Tensor:
    weights, shape = (weight, weight_scale, weight_scale_2), (len(x), weight_scale.shape[1], x.shape[1])
    if few := nvfp4_decode.choose_schedule(*shape):
        return nvfp4_decode.decode_linear(x, *weights, bias, few)
    if many := nvfp4_batch.choose_schedule(*shape):
        return nvfp4_batch.batch_linear(x, *weights, bias, many)
    # ``humming_bias`` swaps the bias between tile order and row order, in both directions.
    return dequantised_linear(x, *weights, None if bias is None else nvfp4_decode.humming_bias(bias))


def dequantised_linear(
    x: Tensor, weight: Tensor, weight_scale: Tensor, weight_scale_2: Tensor, bias: Tensor | None
) -> Tensor:
    """Compute a linear layer, [T, K] bf16 -> [T, N]: dequantise its NVFP4 weight, in the layout of checkpoints or in
    tile order, to scratch memory of 2 N K bytes, and multiply by cuBLAS. The bias is in the order of the outputs, and
    not in the order that the decode GEMM reads."""
    packed = PackedWeight(weight, weight_scale.view(torch.uint8), weight_scale_2)
    return F.linear(x, dequantize(packed, x.dtype), bias)


def _fused_batch(
    tokens: int, a: Sequence[Tensor], b: Sequence[Tensor]
) -> tuple[nvfp4_batch.Schedule, lora_hopper.Schedule] | None:
    """Choose how the work of the batch GEMM and that of ``lora_hopper.shrink`` are divided among thread blocks. Returns
    None if the GEMM cannot add the adapter, or if separate kernels are faster."""
    shape = tokens, sum(map(len, b)), a[0].shape[1]
    if tokens > lora_hopper.MOST_TOKENS or not (many := nvfp4_batch.choose_schedule(*shape, fuses_lora=True)):
        return None
    parts = lora_hopper.choose_schedule(tokens, a, b, nvfp4_batch.spare_sms(many, *shape))
    return (many, parts) if parts else None


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _fake(x: Tensor, weight: Tensor, weight_scale: Tensor, *others: Any) -> Tensor:
    _scale, _bias, _next_weight, gated, *_adapter = others
    # len(x) would make the number of tokens a constant in the graph
    return x.new_empty(x.shape[0], weight_scale.shape[1] // (2 if gated else 1))


def _fake_row(x: Tensor, weight: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


direct_register_custom_op("nvfp4_linear", nvfp4_linear, mutates_args=[], fake_impl=_fake, target_lib=_LIBRARY)
direct_register_custom_op(
    "nvfp4_row_linear", dequantised_linear, mutates_args=[], fake_impl=_fake_row, target_lib=_LIBRARY
)
