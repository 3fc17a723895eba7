"""vLLM's NVFP4 linears on Hopper: our kernels for decoding, Humming's for prompts, on the same weights.

Only the engine imports this module, where it has our kernels: vLLM's for Humming is imported with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.library import Library
from vllm.model_executor.kernels.linear.nvfp4.humming import HummingNvFp4LinearKernel
from vllm.utils.torch_utils import direct_register_custom_op

from qerl_pl.kernels import nvfp4_batch, nvfp4_decode
from qerl_pl.policy.policy import Policy
from qerl_pl.rollout.vllm_setup import decoding_lacks

_LIBRARY = Library("qerl_pl", "FRAGMENT")  # operators live as long as it does
_process, _apply = HummingNvFp4LinearKernel.process_weights_after_loading, HummingNvFp4LinearKernel.apply_weights


@contextmanager
def for_linears_of(policy: Policy, dtype: torch.dtype) -> Iterator[None]:
    """The linears that vLLM loads meanwhile, to compute in a dtype, get our kernels, and keep them.

    Raises:
        ValueError: the GPU, the base's format or the dtype is another one, or a package is missing.
    """
    if missing := decoding_lacks(policy.packed_format, dtype):
        raise ValueError(f"decoding_kernel is 'ours', which needs {', and '.join(missing)}; set it to 'auto'")
    HummingNvFp4LinearKernel.apply_weights = apply_weights  # asks each linear
    HummingNvFp4LinearKernel.process_weights_after_loading = process_weights_after_loading
    try:
        yield
    finally:
        HummingNvFp4LinearKernel.process_weights_after_loading = _process


def process_weights_after_loading(self: Any, layer: Any) -> None:
    """Humming's layout, and our kernels compiled for it where they can multiply by this linear."""
    _process(self, layer)
    if _is_plain(layer, self.layer_config, self.compute_config):
        for kernel in (nvfp4_decode, nvfp4_batch):
            kernel.prepare(self.layer_config.shape_n, self.layer_config.shape_k, layer.weight.device)
        layer.decoding = (self.layer_config.to_str(), self.compute_config)


def apply_weights(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """[..., K] -> [..., N]."""
    decoding: tuple[str, str] | None = getattr(layer, "decoding", None)
    if decoding is None:
        return _apply(self, layer, x, bias)
    given = getattr(layer, "zero_bias" if bias is None else "bias", None)
    tensors = layer.weight, layer.weight_scale, layer.weight_scale_2, given, self.locks
    y = torch.ops.qerl_pl.nvfp4_linear(x.reshape(-1, x.shape[-1]), *tensors, *decoding)
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
) -> Tensor:
    """[T, K] bf16 -> [T, N] by the kernel that is faster for so many tokens; an operator for torch.compile."""
    shape = len(x), weight_scale.shape[1], x.shape[1]
    if few := nvfp4_decode.schedule(*shape):
        return nvfp4_decode.decode_linear(x, weight, weight_scale, weight_scale_2, bias, few)
    if more := nvfp4_batch.schedule(*shape):
        return nvfp4_batch.batch_linear(x, weight, weight_scale, weight_scale_2, bias, more)
    return import_module("humming.ops").humming_gemm(
        layer_config=layer_config,
        compute_config=compute_config,
        inputs=x,
        weight=weight,
        weight_scale=weight_scale,
        weight_scale_2=weight_scale_2,
        bias=bias,
        locks=locks,
    )


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
