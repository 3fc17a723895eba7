"""RMSNorm and the gate of the MLP in vLLM's models by kernels that are launched early, and let the next linear start.

Only ``vllm_plugin`` imports this module.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import Library
from vllm import ir
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.utils.torch_utils import direct_register_custom_op

from qerl_pl.kernels import block

PROVIDER = "qerl_pl"  # of an operator, in vLLM's words: who implements it
PRIORITY = {"rms_norm": [PROVIDER], "fused_add_rms_norm": [PROVIDER]}  # what vLLM prefers follows by itself

_LIBRARY = Library("qerl_pl", "FRAGMENT")  # operators live as long as it does


def _rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return block.rms_norm(x, weight, epsilon)


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    return block.add_rms_norm(x, residual, weight, epsilon)


def _silu_and_mul(x: Tensor) -> Tensor:
    return block.silu_and_mul(x)


def _norm_shape(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    del weight, epsilon
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _add_norm_shape(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    out = _norm_shape(x, weight, epsilon)
    return out, torch.empty_like(out)


def _gate_shape(x: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


# torch.compile does not look into these, and knows what they return by the second function.
for operator, fake in ((_rms_norm, _norm_shape), (_add_rms_norm, _add_norm_shape), (_silu_and_mul, _gate_shape)):
    direct_register_custom_op(operator.__name__[1:], operator, [], fake, target_lib=_LIBRARY)


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    """vLLM's operator of this name, where ``is_ours`` says so."""
    del variance_size
    return torch.ops.qerl_pl.rms_norm(x, weight, epsilon)


def add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """vLLM's ``fused_add_rms_norm``, where ``is_ours`` says so."""
    del variance_size
    return torch.ops.qerl_pl.add_rms_norm(x, x_residual, weight, epsilon)


def is_ours(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    """Whether our kernel computes a norm: its mean is over all of a row, and everything is in one dtype."""
    del epsilon
    return variance_size is None and weight is not None and weight.dtype == x.dtype and x.stride(-1) == 1


def _is_ours_with_residual(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return is_ours(x, weight, epsilon, variance_size) and x_residual.stride(-1) == 1


class EarlySiluAndMul(SiluAndMul):
    """vLLM's activation by our kernel."""

    @staticmethod
    def forward_native(x: Tensor) -> Tensor:
        """x: [..., 2 I]; returns [..., I]."""
        return torch.ops.qerl_pl.silu_and_mul(x)

    def forward_cuda(self, x: Tensor) -> Tensor:
        """The same where vLLM does not compile."""
        return self.forward_native(x)


def install() -> None:
    """Let vLLM know of these kernels, through its tables of operators."""
    ir.ops.rms_norm.register_impl(PROVIDER, supports_args=is_ours)(rms_norm)
    ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supports_args=_is_ours_with_residual)(add_rms_norm)
    SiluAndMul.register_oot(EarlySiluAndMul)
