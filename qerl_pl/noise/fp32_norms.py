"""RMS norms with fp32 weights and 16-bit activations, so that noise smaller than the spacing of 16-bit numbers is not
rounded away.

bf16 numbers near 1 are 2^-8 to 2^-7 apart, and those near 8 eight times as far. If noisy weights were rounded to bf16,
a tenth or less of noise with sigma 5e-4 (arXiv 2510.11696) would be left. Noisy weights therefore stay in fp32. A norm
here rounds its normalised input to the activations' dtype, multiplies it by the weight in fp32 and rounds the product.
The product of two bf16 numbers is exact in fp32, so a bf16 weight that is stored in fp32 gives the same bits as the
bf16 weight does in transformers' norms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Compute weight * x / sqrt(mean(x^2) + epsilon) in fp32, and return it in the dtype of x.

    Args:
        x: [..., H] of any floating dtype.
        weight: [H] fp32, or of the dtype of x.
        epsilon: added to the mean square.
    """
    wide = x.float()
    normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (weight * normal.to(x.dtype)).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return the RMS norm of x + residual, and the sum x + residual. As in transformers, the sum is rounded to the
    dtype of x before it is normalised."""
    total = (x.float() + residual.float()).to(x.dtype)
    return rms_norm(total, weight, epsilon), total


def output_in_input_dtype(_module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Forward hook for a norm with fp32 weights: casts its output to the dtype of its input, so that the 16-bit
    residual stream does not become fp32."""
    return output.to(args[0].dtype)


@contextmanager
def weights_replaced(modules: Mapping[str, nn.Module], weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Replace the weights of transformers' norms inside the context; each norm's output keeps the dtype of its input.

    Args:
        modules: norm modules by name, each with a parameter ``weight``.
        weights: new weights, [H] of any dtype, by name of the module; they must not be modified inside the context.
    """
    parameters = {name: modules[name].get_parameter("weight") for name in weights}
    own = {name: parameter.data for name, parameter in parameters.items()}
    hooks = [modules[name].register_forward_hook(output_in_input_dtype) for name in weights]
    try:
        for name, parameter in parameters.items():
            parameter.data = weights[name]
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = own[name]
        for hook in hooks:
            hook.remove()
