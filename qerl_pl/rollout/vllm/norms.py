"""Norms with fp32 weights in vLLM's model. 16-bit weights would round away the small noise that adaptive quantization
noise (AQN) adds to norm weights. Activations stay in the compute dtype.

With 16-bit activations, all implementations of norms in vLLM 0.32 accept an fp32 weight, except the CUDA kernel, which
vLLM does not use for an fp32 weight. In a compiled engine, Inductor fuses a norm with its neighbours and does not round
the normalised input, whatever the weight's dtype. So a bf16 weight stored in fp32 gives the same bits as the bf16
weight. An engine without compilation computes its norms by the functions of ``qerl_pl.noise.fp32_norms`` instead of
vLLM's implementations; they round as transformers does.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qerl_pl.noise.fp32_norms import add_rms_norm, rms_norm
from qerl_pl.noise.norm_noise import is_noise_norm

PROVIDER = "qerl_pl"


def arguments(*, compiled: bool) -> dict[str, Any]:
    """Build the arguments of ``vllm.LLM`` that select an implementation of norms that supports fp32 weights."""
    if compiled:
        return {}
    _register()
    return {"ir_op_priority": {"rms_norm": [PROVIDER], "fused_add_rms_norm": [PROVIDER]}}


def widen(model: nn.Module, norms: Sequence[str]) -> None:
    """Convert the weights of the norms of a loaded vLLM model that ``norms`` names, in every block, to fp32."""
    for name, module in model.named_modules():
        if is_noise_norm(f"{name}.weight", norms):
            module.weight = nn.Parameter(module.get_parameter("weight").detach().float(), requires_grad=False)


def _register() -> None:
    from vllm import ir

    if PROVIDER in ir.ops.rms_norm.impls:
        return

    def is_ours(x: Tensor, weight: Tensor | None, variance_size: int | None) -> bool:
        wide = weight is not None and weight.dtype == torch.float32 and x.dtype != torch.float32
        return wide and variance_size is None

    @ir.ops.rms_norm.register_impl(
        PROVIDER, supports_args=lambda x, weight, epsilon, variance_size=None: is_ours(x, weight, variance_size)
    )
    def _rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
        assert weight is not None
        return rms_norm(x, weight, epsilon)

    @ir.ops.fused_add_rms_norm.register_impl(
        PROVIDER,
        supports_args=lambda x, x_residual, weight, epsilon, variance_size=None: is_ours(x, weight, variance_size),
    )
    def _fused_add_rms_norm(
        x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> tuple[Tensor, Tensor]:
        assert weight is not None
        return add_rms_norm(x, x_residual, weight, epsilon)
