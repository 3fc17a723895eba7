"""vLLM's NVFP4 linears on Hopper: our kernels for decoding, Humming's for prompts, on the same weights.

Only the engine imports this module, where it has our kernels: vLLM's for Humming is imported with it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import Library
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.model_executor.kernels.linear.nvfp4.humming import HummingNvFp4LinearKernel
from vllm.utils.torch_utils import direct_register_custom_op

from qerl_pl.kernels import hopper, lora_hopper, nvfp4_batch, nvfp4_decode
from qerl_pl.kernels.lora import add_lora
from qerl_pl.policy.policy import Policy
from qerl_pl.rollout.vllm import patches
from qerl_pl.rollout.vllm.cuda import OneAdapterKernels, slots
from qerl_pl.rollout.vllm.humming import without_served
from qerl_pl.rollout.vllm.setup import decoding_lacks

_LIBRARY = Library("qerl_pl", "FRAGMENT")  # operators live as long as it does
_process, _apply = HummingNvFp4LinearKernel.process_weights_after_loading, HummingNvFp4LinearKernel.apply_weights
_apply_with_adapter = BaseLinearLayerWithLoRA._apply_sync


@contextmanager
def for_linears_of(policy: Policy, dtype: torch.dtype) -> Iterator[None]:
    """The linears that vLLM loads meanwhile, to compute in a dtype, get our kernels, and keep them.

    Raises:
        ValueError: the GPU, the base's format or the dtype is another one, or a package is missing.
    """
    if missing := decoding_lacks(policy.packed_format, dtype):
        raise ValueError(f"decoding_kernel is 'native', which needs {', and '.join(missing)}; set it to 'auto'")
    with patches.native_nvfp4_linears(process_weights_after_loading, apply_weights, apply_with_adapter):
        yield


def process_weights_after_loading(self: Any, layer: Any) -> None:
    """Humming's layout, and our kernels compiled for it where they can multiply by this linear."""
    _process(self, layer)
    if _is_plain(layer, self.layer_config, self.compute_config):
        prepare(self.layer_config.shape_n, self.layer_config.shape_k, layer.weight.device)
        layer.decoding = self.locks, self.layer_config.to_str(), self.compute_config


@cache
def prepare(outputs: int, inputs: int, device: torch.device) -> None:
    """Our kernels for linears of one shape, and for their adapters; all blocks of a model have the same shapes."""
    linears = *nvfp4_decode.kernels_for(outputs, inputs), *nvfp4_batch.kernels_for(outputs, inputs)
    hopper.prepare([*linears, *lora_hopper.all_kernels()], device)


def apply_weights(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """[..., K] -> [..., N]."""
    if getattr(layer, "decoding", None) is None:
        return _apply(self, layer, x, bias)
    return _call(layer, x, bias, [], [], None, None)


def apply_with_adapter(self: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """[..., K] -> [..., N] of a linear of vLLM's that has adapters."""
    layer = self.base_layer
    if getattr(layer, "decoding", None) is None or not isinstance(self.punica_wrapper, OneAdapterKernels):
        return _apply_with_adapter(self, x, bias)
    return _call(layer, x, bias, self.lora_a_stacked, self.lora_b_stacked, *self.punica_wrapper.tokens)


def fewest_apart(linear: Any) -> int:
    """Tokens from which on a linear of vLLM's that is ours has its adapter added by the kernels for any base."""
    a, b = slots(linear.lora_a_stacked), slots(linear.lora_b_stacked)
    return next(tokens for tokens in count(1) if not _our_linear_with(tokens, a, b))


def _call(layer: Any, x: Tensor, bias: Tensor | None, *adapter: Any) -> Tensor:
    given = getattr(layer, "zero_bias" if bias is None else "bias", None)
    weights = layer.weight, layer.weight_scale, layer.weight_scale_2
    y = torch.ops.qerl_pl.nvfp4_linear(x.reshape(-1, x.shape[-1]), *weights, given, *layer.decoding, *adapter)
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
    a: list[Tensor],
    b: list[Tensor],
    indices: Tensor | None,
    no_lora: Tensor | None,
) -> Tensor:
    """[T, K] bf16 -> [T, N] by the kernel that is faster for so many tokens; an operator for torch.compile.

    An adapter's product is added by the same kernel where it can.

    Args:
        x, weight, weight_scale, weight_scale_2, bias: as of ``nvfp4_decode.decode_linear``.
        locks, layer_config, compute_config: Humming's.
        a: one [1, 1, R, K] for each slice of N; none without an adapter.
        b: one [1, 1, n, R] for each slice.
        indices: [T] or longer, int64: -1 for a token without the adapter.
        no_lora: [1] bool on the host: True if that is every token.
    """
    adapter = None
    if indices is not None and no_lora is not None and not no_lora.item():
        adapter = slots(a), slots(b), indices
    if adapter and (found := _our_linear_with(len(x), *adapter[:2])):
        multiply, blocks = found
        x = x.contiguous()
        first, second, which = adapter
        update = lora_hopper.Update(lora_hopper.shrink(x, first, which, blocks), second)
        return multiply(x, weight, weight_scale, weight_scale_2, bias, update=update)
    if ours := _our_linear(len(x), weight_scale.shape[1], x.shape[1]):
        y = ours.multiply(x, weight, weight_scale, weight_scale_2, bias)
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


@cache
def prompt_schedules(layer_config: str, compute_config: str) -> str:
    """What Humming is to run where our kernels do not, as it reads it: of its kernels for a linear, about half.

    It compiles all that it may run when it is first called: by itself 33 for each shape, most of them for few tokens.
    """
    about = json.loads(layer_config)
    schedules = import_module("humming.tune").get_heuristics_config(about, **json.loads(compute_config))
    ours = partial(_our_linear, outputs=about["shape_n"], inputs=about["shape_k"])
    return json.dumps(without_served(schedules, ours))


class _OurLinear(NamedTuple):
    multiply: Callable[..., Tensor]
    room: lora_hopper.Room
    """Beside it, for an adapter."""


def _our_linear(tokens: int, outputs: int, inputs: int, *, alone: bool = True) -> _OurLinear | None:
    """None where Humming's is faster, or, if it is not ``alone`` and adds an adapter, where ours cannot."""
    if few := nvfp4_decode.schedule(tokens, outputs, inputs):
        return _OurLinear(partial(nvfp4_decode.decode_linear, how=few), lora_hopper.Room(0, 0.0))
    if more := nvfp4_batch.schedule(tokens, outputs, inputs, alone=alone):
        multiply = partial(nvfp4_batch.batch_linear, how=more)
        return _OurLinear(multiply, nvfp4_batch.room(more, tokens, outputs, inputs))
    return None


def _our_linear_with(
    tokens: int, a: Sequence[Tensor], b: Sequence[Tensor]
) -> tuple[Callable[..., Tensor], lora_hopper.Blocks] | None:
    """That adds an adapter itself; None where it is better added apart."""
    ours = _our_linear(tokens, sum(map(len, b)), a[0].shape[1], alone=False)
    blocks = lora_hopper.blocks(tokens, a, b, ours.room) if ours else None
    return (ours.multiply, blocks) if ours and blocks else None


def _fake(x: Tensor, weight: Tensor, weight_scale: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape[0], weight_scale.shape[1])  # len(x) would make a constant of the number of tokens


direct_register_custom_op("nvfp4_linear", nvfp4_linear, mutates_args=[], fake_impl=_fake, target_lib=_LIBRARY)


def _is_plain(layer: Any, config: Any, compute_config: str) -> bool:
    """Whether it is bf16 times NVFP4 with one global scale, whose shape Humming did not pad."""
    global_scale = getattr(layer, "weight_scale_2", None)
    return (
        layer.params_dtype == torch.bfloat16
        and not config.input_quant_mode.should_quantize
        and (config.b_dtype.num_bits, config.weight_scale_group_size) == (4, nvfp4_decode.SLAB)
        and getattr(layer, "weight_scale", torch.empty(0)).dtype == torch.float8_e4m3fn
        and isinstance(global_scale, Tensor)
        and global_scale.numel() == 1
        and not (config.pad_shape_n or config.pad_shape_k)
        and not json.loads(compute_config)["use_batch_invariant"]
    )
