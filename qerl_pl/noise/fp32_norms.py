"""RMS norms with fp32 weights and 16-bit activations, so that noise on the weights is not rounded away if it is smaller
than the spacing of 16-bit numbers.

bf16 numbers are 2^-8 apart just below 1 and 2^-7 just above. So if noise with standard deviation 5e-4 (arXiv
2510.11696) were added to a bf16 weight and the sum rounded to bf16, about one in 10,000 weights just below 1 would
change, and none above 1. These norms round the normalised input to the activations' dtype, multiply it by the weight in
fp32 and round the product. The product of two bf16 numbers is exact in fp32, so a bf16 weight that is stored in fp32
gives the same bits as the bf16 weight does in transformers' norms.

H is the hidden size.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Compute weight * x / sqrt(mean(x^2) + epsilon) for [..., H] inputs and [H] weights, in the dtype of x."""
    wide = x.float()
    normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return (weight * normal.to(x.dtype)).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return the RMS norm of x + residual, and the sum x + residual."""
    # as in transformers, the sum is rounded to the dtype of x before it is normalised
    total = (x.float() + residual.float()).to(x.dtype)
    return rms_norm(total, weight, epsilon), total


def output_in_input_dtype(_module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Cast a norm's output to the dtype of its input, as a forward hook, so that the residual stream stays in 16
    bits."""
    return output.to(args[0].dtype)


@contextmanager
def weights_replaced(modules: Mapping[str, nn.Module], weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Replace, inside the context, the weights of transformers' norms by other weights [H] of any dtype, of the same
    names. Outputs keep the dtype of their inputs."""
    with ExitStack() as after:
        for name, weight in weights.items():
            parameter = modules[name].get_parameter("weight")
            after.callback(setattr, parameter, "data", parameter.data)
            after.callback(modules[name].register_forward_hook(output_in_input_dtype).remove)
            parameter.data = weight
        yield
