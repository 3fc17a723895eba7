"""The product with an NVFP4 weight in fp32, the definition that tests compare the GEMM kernels of ``hopper`` with."""

from torch import Tensor

from qerl_pl.quant.nvfp4 import BLOCK


def decode_linear_reference(x: Tensor, weight: Tensor, scales: Tensor, global_scale: Tensor) -> Tensor:
    """Compute x W^T, [T, N] fp32, from x [T, K], e2m1 values [N, K], scales [N, K / 16] and tensor scale [1]."""
    return x.float() @ (weight.float() * scales.float().repeat_interleave(BLOCK, 1)).T * global_scale
