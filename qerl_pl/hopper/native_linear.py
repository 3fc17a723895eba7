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
    """Weight of the linear layer that is computed after this one, or None; ``nvfp4_decode.decode_linear`` prefetches
    it."""
    gated: bool = False
    """Whether the layer is the fused gate and up of an MLP, without a bias, and its operator returns silu(gate) *
    up."""

    def fewest_unfused(self, linear: Any) -> int:
        """Return the smallest number of tokens for which a linear layer's LoRA adapter is added by separate kernels
        after the GEMM, because that is faster or because the GEMM kernels cannot add it. For fewer tokens, the GEMM's
        kernel adds it."""
        a, b = slots(linear.lora_a_stacked), slots(linear.lora_b_stacked)
        shape, takes = (sum(map(len, b)), a[0].shape[1]), lora_hopper.fits_adapter(a, b)

        def is_fused(tokens: int) -> bool:
            return takes and bool(nvfp4_decode.choose_schedule(tokens, *shape) or _fused_batch(tokens, a, b))

        return next(tokens for tokens in count(1) if not is_fused(tokens))


class NativeLinear(NvFp4LinearKernel):
    """Kernel class for vLLM that computes NVFP4 linear layers with 16-bit activations. After loading, a layer's weight
    is rearranged to the layout that this project's CUDA kernels read (``tile_order``), if they support its shape. Any
    other weight keeps the layout of checkpoints, and is dequantised in every call."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        return True, None  # the engine has asked ``lacks``

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: Any) -> None:
        """Convert a layer's ``weight`` [N, K / 2] uint8, ``weight_scale`` [N, K / 16] e4m3 and ``weight_global_scale``
        [] fp32, for N outputs and K inputs, to the tensors that this project's kernels read. If the trainer holds the
        same bits in GPU memory, the layer uses the trainer's tensors, and its own are freed."""
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
    """Load this project's CUDA kernels for linear layers of one shape, and for their LoRA adapters, on a device.
    Kernels that are not in Triton's cache folder are compiled first."""
    driver.prepare(kernels_for(outputs, inputs), device)


def kernels_for(outputs: int, inputs: int) -> list[driver.Kernel]:
    """List this project's CUDA kernels for linear layers of one shape and for their adapters."""
    linears = *nvfp4_decode.kernels_for(outputs, inputs), *nvfp4_batch.kernels_for(outputs, inputs)
    return [*linears, *lora_hopper.all_kernels()]


def apply_with_adapter(self: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute a linear layer and its LoRA adapter, [..., K] -> [..., N]; replaces ``_apply_sync`` of vLLM's LoRA
    layers."""
    layer = self.base_layer
    if not hasattr(layer, "native") or not isinstance(self.punica_wrapper, OneAdapterKernels):
        return _apply_with_adapter(self, x, bias)
    return call(layer, x, bias, slots(self.lora_a_stacked), slots(self.lora_b_stacked), *self.punica_wrapper.tokens)


def call(layer: Any, x: Tensor, bias: Tensor | None, *adapter: Any) -> Tensor:
    """Compute a linear layer of vLLM by this project's CUDA kernels: [..., K] -> [..., N] for K inputs and N outputs,
    or [..., N / 2] if the layer is a fused gate and up whose kernel also computes silu(gate) * up (``Native.gated``).
    The layer must have the attribute ``native``. ``adapter`` is empty, or has the arguments a, b, indices and no_lora
    of ``nvfp4_linear``."""
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

    The number of tokens decides how the product is computed: for few tokens by the decode GEMM (``nvfp4_decode``), for
    more by the batch GEMM (``nvfp4_batch``), and for the most by cuBLAS with a dequantised weight. The decode GEMM and
    the batch GEMM also add the adapter if this is faster than separate kernels. If ``gated``, the decode GEMM also
    computes silu(gate) * up, so that no kernel runs between it and the GEMM of ``down``; after the batch GEMM and
    cuBLAS, vLLM's kernel computes it, with the same roundings.

    Args:
        x, weight, weight_scale, weight_scale_2, bias: as in ``nvfp4_decode.decode_linear``.
        next_weight: weight of the linear layer that runs next, or None; see ``nvfp4_decode.decode_linear``.
        gated: whether the layer is the fused gate and up of an MLP.
        a: one [R, K] for each part of a fused layer, such as q, k and v; empty without an adapter.
        b: one [n, R] for each part, which has n outputs.
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
    """Compute a linear layer with N outputs, [T, K] bf16 -> [T, N]: dequantise its NVFP4 weight to scratch memory of 2
    N K bytes, and multiply by cuBLAS. The weight may have the layout of checkpoints or that of ``tile_order``; the bias
    is in the order of the outputs, not in that of ``nvfp4_decode.humming_bias``."""
    packed = PackedWeight(weight, weight_scale.view(torch.uint8), weight_scale_2)
    return F.linear(x, dequantize(packed, x.dtype), bias)


def _fused_batch(
    tokens: int, a: Sequence[Tensor], b: Sequence[Tensor]
) -> tuple[nvfp4_batch.Schedule, lora_hopper.Schedule] | None:
    """Choose the divisions among thread blocks of the GEMM ``nvfp4_batch``, which also adds the LoRA adapter's product
    h B^T, and of the kernel ``lora_hopper.shrink``, which computes h = x A^T. Returns None if the GEMM cannot add the
    adapter, or if separate kernels are faster."""
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
