"""RMS norms with fp32 weights among 16-bit activations, so that noise below the spacing of 16-bit weights acts.

bf16 weights near 1 are 2^-8 to 2^-7 apart, those near 8 eight times as far: of noise with sigma 5e-4 (arXiv 2510.11696)
rounding to bf16 leaves a tenth or less. Here noisy weights stay in fp32. The normalised input is rounded to the
activations' dtype, multiplied by the weight in fp32, and the product rounded. The product of two bf16 numbers is exact
in fp32, so with a bf16 weight that is stored in fp32 this is, bit for bit, what transformers' norms compute with the
bf16 weight.
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
    """Return the RMS norm of x + residual, and this sum, which is rounded to the dtype of x before the norm, as in
    transformers."""
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
