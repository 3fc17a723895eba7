"""NVFP4 linears of vLLM on Hopper: this project's native kernels for decoding, and other kernels, which read the same
weights, for prompts.

The native kernels are in ``qerl_pl.kernels``. Prompts are computed by Humming's kernels. For at least
``costs.DEQUANTISED_FROM`` tokens, and for all prompts if Humming is not used (``without_humming.py``), the weight is
dequantised to scratch memory and multiplied by cuBLAS. This module imports vLLM's Humming classes, so the engine
imports it only if the native kernels can run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from importlib import import_module
from itertools import count
from threading import Thread
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import Library
from torch.nn import functional as F
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.model_executor.kernels.linear.nvfp4.humming import HummingNvFp4LinearKernel
from vllm.utils.torch_utils import direct_register_custom_op

from qerl_pl.kernels import costs, hopper, lora_hopper, nvfp4_batch, nvfp4_decode
from qerl_pl.kernels.lora import add_lora
from qerl_pl.policy.policy import Policy
from qerl_pl.quant.formats import PackedWeight
from qerl_pl.quant.nvfp4 import dequantize
from qerl_pl.quant.selection import fused_groups
from qerl_pl.rollout.vllm import base_weights
from qerl_pl.rollout.vllm.cuda import OneAdapterKernels, slots
from qerl_pl.rollout.vllm.humming import without_served
from qerl_pl.rollout.vllm.nvfp4_patches import native_nvfp4_linears
from qerl_pl.rollout.vllm.setup import decoding_lacks

_LIBRARY = Library("qerl_pl", "FRAGMENT")  # torch unregisters a Library's operators when the Library object is deleted
_process, _apply = HummingNvFp4LinearKernel.process_weights_after_loading, HummingNvFp4LinearKernel.apply_weights
_apply_with_adapter = BaseLinearLayerWithLoRA._apply_sync


@contextmanager
def for_linears_of(policy: Policy, dtype: torch.dtype) -> Iterator[None]:
    """Make the NVFP4 linears that vLLM loads within this context use this project's native kernels, also after the
    context. Start to compile these kernels.

    Raises:
        ValueError: the native kernels do not support this GPU, format or dtype, or a package is missing.
    """
    if missing := decoding_lacks(policy.packed_format, dtype):
        raise ValueError(f"decoding_kernel is 'native', which needs {', and '.join(missing)}; set it to 'auto'")
    linears = policy.packed_linears()
    groups = fused_groups(list(linears), present=linears.keys()).values()
    shapes = {(sum(linears[name].out_features for name in group), linears[group[0]].in_features) for group in groups}
    for outputs, inputs in shapes:
        hopper.start_compiling(_kernels_for(outputs, inputs))
    with native_nvfp4_linears(process_weights_after_loading, apply_weights, apply_with_adapter):
        yield


def process_weights_after_loading(self: Any, layer: Any) -> None:
    """Convert a linear's weights to Humming's layout. If the native kernels support the linear, compile them for its
    shape, start compiling Humming's kernels for prompts, and use the trainer's copy of the weights instead of vLLM's if
    it has the same layout."""
    base_weights.give(layer)
    _process(self, layer)
    if _is_plain(layer, self.layer_config, self.compute_config):
        prepare(self.layer_config.shape_n, self.layer_config.shape_k, layer.weight.device)
        layer.decoding = self.locks, self.layer_config.to_str(), self.compute_config, None
        compiling(*layer.decoding[1:3], layer.weight.device)
        base_weights.adopt(layer)


@cache
def prepare(outputs: int, inputs: int, device: torch.device) -> None:
    """Load the native kernels for linears of one shape and for their adapters, compiled if necessary; cached, as all
    decoder blocks have linears of the same shapes."""
    hopper.prepare(_kernels_for(outputs, inputs), device)


def apply_weights(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute a linear without an adapter, [..., K] -> [..., N]; replaces the method of this name of vLLM's Humming
    kernel."""
    if getattr(layer, "decoding", None) is None:
        return _apply(self, layer, x, bias)
    return call(layer, x, bias)


def apply_with_adapter(self: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute a linear with an adapter, [..., K] -> [..., N]; replaces ``_apply_sync`` of vLLM's LoRA layers."""
    layer = self.base_layer
    if getattr(layer, "decoding", None) is None or not isinstance(self.punica_wrapper, OneAdapterKernels):
        return _apply_with_adapter(self, x, bias)
    return call(layer, x, bias, self.lora_a_stacked, self.lora_b_stacked, *self.punica_wrapper.tokens)


def fewest_unfused(linear: Any) -> int:
    """Return the smallest number of tokens for which a linear's LoRA adapter is added by separate kernels and not by
    this project's native GEMM."""
    a, b = slots(linear.lora_a_stacked), slots(linear.lora_b_stacked)
    return next(tokens for tokens in count(1) if not _fused_linear(tokens, a, b))


def call(layer: Any, x: Tensor, bias: Tensor | None, *adapter: Any) -> Tensor:
    """Compute a linear for which native kernels were compiled, [..., K] -> [..., N]; ``adapter`` holds the arguments a,
    b, indices and no_lora of ``nvfp4_linear``."""
    given = getattr(layer, "zero_bias" if bias is None else "bias", None)
    weights = layer.weight, layer.weight_scale, layer.weight_scale_2
    y = torch.ops.qerl_pl.nvfp4_linear(
        x.reshape(-1, x.shape[-1]), *weights, given, *layer.decoding, *(adapter or ([], [], None, None))
    )
    return y.view(*x.shape[:-1], y.shape[-1])


def nvfp4_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_scale_2: Tensor,
    bias: Tensor | None,
    locks: Tensor,
    layer_config: str,
    compute_config: str,
    next_weight: Tensor | None,
    a: list[Tensor],
    b: list[Tensor],
    indices: Tensor | None,
    no_lora: Tensor | None,
) -> Tensor:
    """Compute an NVFP4 linear [T, K] bf16 -> [T, N] with the kernel that is fastest for T tokens; registered as an
    operator that is opaque to torch.compile.

    The linear's kernel also adds the adapter if this is supported and faster; otherwise ``kernels.lora.add_lora`` adds
    it afterwards.

    Args:
        x, weight, weight_scale, weight_scale_2, bias: as in ``nvfp4_decode.decode_linear``.
        locks, layer_config, compute_config: arguments of the GEMM of the library Humming; with the layer_config "" it
            is not used.
        next_weight: weight of the linear that is computed after this one, or None; see ``nvfp4_decode.decode_linear``.
        a: one [1, 1, R, K] for each part of a fused linear, such as q, k and v; empty without an adapter.
        b: one [1, 1, n, R] for each part, which has n outputs.
        indices: [T] or longer, int64: -1 for a token without the adapter.
        no_lora: [1] bool on the host: True if no token has the adapter.
    """
    if layer_config:
        compiling(layer_config, compute_config, x.device).join()
    adapter = None
    if indices is not None and no_lora is not None and not no_lora.item():
        adapter = slots(a), slots(b), indices
    if adapter and (found := _fused_linear(len(x), *adapter[:2], next_weight)):
        multiply, schedule = found
        x = x.contiguous()
        first, second, which = adapter
        update = lora_hopper.Update(lora_hopper.shrink(x, first, which, schedule), second)
        return multiply(x, weight, weight_scale, weight_scale_2, bias, update=update)
    if native := _native_linear(len(x), weight_scale.shape[1], x.shape[1], next_weight):
        y = native.multiply(x, weight, weight_scale, weight_scale_2, bias)
    elif not layer_config or len(x) >= costs.DEQUANTISED_FROM:
        # ``humming_bias`` swaps the bias between Humming's order and row order, in both directions.
        in_rows = None if bias is None else nvfp4_decode.humming_bias(bias)
        y = dequantised_linear(x, weight, weight_scale, weight_scale_2, in_rows)
    else:
        y = import_module("humming.ops").humming_gemm(
            layer_config=layer_config,
            compute_config=compute_config,
            tuning_config=prompt_schedules(layer_config, compute_config),
            inputs=x,
            weight=weight,
            weight_scale=weight_scale,
            weight_scale_2=weight_scale_2,
            bias=bias,
            locks=locks,
        )
    if adapter:
        add_lora(y, x, *adapter)
    return y


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
    packed = PackedWeight(weight, weight_scale.view(torch.uint8), weight_scale_2.double())
    return F.linear(x, dequantize(packed, x.dtype), bias)


@cache
def prompt_schedules(layer_config: str, compute_config: str) -> str:
    """Return Humming's schedules of a linear (tile sizes for ranges of token counts) as JSON, without the schedules for
    token counts that this project's kernels compute.

    Leaving schedules out saves time: at its first call, Humming compiles every schedule that it is given, by default 33
    per shape, most of them for few tokens.
    """
    about = json.loads(layer_config)
    schedules = import_module("humming.tune").get_heuristics_config(about, **json.loads(compute_config))
    native = partial(_native_linear, outputs=about["shape_n"], inputs=about["shape_k"])
    return json.dumps(without_served(schedules, native))


@cache
def compiling(layer_config: str, compute_config: str, device: torch.device) -> Thread:
    """Return the thread that compiles Humming's kernels for the linears of one shape; the first call starts it.

    Humming compiles the kernels of a linear when it is called, which takes seconds for each shape. The threads do this
    for all shapes at once, while vLLM compiles its graphs. If one fails, the call compiles the kernels, and says why
    that fails. A linear waits for its thread whichever kernel computes it, so that no thread loads kernels into the GPU
    while a CUDA graph is captured; vLLM runs the model before it captures one.
    """
    schedules = prompt_schedules(layer_config, compute_config)

    def compile_all() -> None:
        with suppress(Exception):
            kernels = import_module("humming.kernel.humming").HummingKernel
            kernels.prepare_kernels(layer_config, compute_config, schedules, device)

    thread = Thread(target=compile_all, daemon=True)
    thread.start()
    return thread


def _kernels_for(outputs: int, inputs: int) -> list[hopper.Kernel]:
    linears = *nvfp4_decode.kernels_for(outputs, inputs), *nvfp4_batch.kernels_for(outputs, inputs)
    return [*linears, *lora_hopper.all_kernels()]


class _NativeLinear(NamedTuple):
    multiply: Callable[..., Tensor]
    spare: lora_hopper.SpareSMs


def _native_linear(
    tokens: int,
    outputs: int,
    inputs: int,
    next_weight: Tensor | None = None,
    *,
    fuses_lora: bool = False,
) -> _NativeLinear | None:
    """Choose this project's native kernel for a GEMM with an NVFP4 weight, which also adds an adapter if ``fuses_lora``
    is set. Return None if no native kernel can run it."""
    if few := nvfp4_decode.choose_schedule(tokens, outputs, inputs):
        multiply = partial(nvfp4_decode.decode_linear, schedule=few, next_weight=next_weight)
        return _NativeLinear(multiply, lora_hopper.SpareSMs(0, 0.0))
    if more := nvfp4_batch.choose_schedule(tokens, outputs, inputs, fuses_lora=fuses_lora):
        multiply = partial(nvfp4_batch.batch_linear, schedule=more)
        return _NativeLinear(multiply, nvfp4_batch.spare_sms(more, tokens, outputs, inputs))
    return None


def _fused_linear(
    tokens: int, a: Sequence[Tensor], b: Sequence[Tensor], next_weight: Tensor | None = None
) -> tuple[Callable[..., Tensor], lora_hopper.Schedule] | None:
    """Choose a native GEMM that also adds the LoRA adapter, and the schedule of the kernel for x A^T. Return None if no
    such GEMM exists, or if adding the adapter after the GEMM is faster."""
    native = _native_linear(tokens, sum(map(len, b)), a[0].shape[1], next_weight, fuses_lora=True)
    schedule = lora_hopper.choose_schedule(tokens, a, b, native.spare) if native else None
    return (native.multiply, schedule) if native and schedule else None


def _fake(x: Tensor, weight: Tensor, weight_scale: Tensor, *_: object) -> Tensor:
    # len(x) would make the number of tokens a constant in the graph
    return x.new_empty(x.shape[0], weight_scale.shape[1])


direct_register_custom_op("nvfp4_linear", nvfp4_linear, mutates_args=[], fake_impl=_fake, target_lib=_LIBRARY)


def _is_plain(layer: Any, config: Any, compute_config: str) -> bool:
    """Return whether this project's native kernels can compute a linear: bf16 activations, NVFP4 weights with one
    tensor scale, and no padding by Humming."""
    global_scale = getattr(layer, "weight_scale_2", None)
    return (
        layer.params_dtype == torch.bfloat16
        and not config.input_quant_mode.should_quantize
        and (config.b_dtype.num_bits, config.weight_scale_group_size) == (4, nvfp4_decode.K_BLOCK)
        and getattr(layer, "weight_scale", torch.empty(0)).dtype == torch.float8_e4m3fn
        and isinstance(global_scale, Tensor)
        and global_scale.numel() == 1
        and not (config.pad_shape_n or config.pad_shape_k)
        and not json.loads(compute_config)["use_batch_invariant"]
    )
