"""Linear layer with a frozen 4-bit weight, which it dequantises in forward and again in backward.

Letters: N outputs, K inputs.
"""

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

from qerl_pl.quant.formats import Format, PackedWeight
from qerl_pl.quant.nvfp4 import NVFP4


class FrozenLinear(nn.Module):
    """Linear layer y = x W^T + b with a frozen 4-bit weight W [N, K] and a frozen bias b [N].

    It has no parameters, only buffers: codes and scales as integers, which ``module.to(dtype)`` does not convert, and
    the bias. The product is computed in the dtype of x. For backward, autograd keeps only the 4-bit weight. The buffers
    of a new layer are zero; assign ``packed`` and ``bias`` to fill them. An NVFP4 weight may be in tile order
    (``hopper/tile_order.py``), so that trainer and engine share one copy.
    """

    codes: Tensor
    block_scale: Tensor
    global_scale_bits: Tensor
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        fmt: Format = NVFP4,
        *,
        bias: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if in_features % fmt.block:
            raise ValueError(f"in_features is {in_features}; expected a multiple of {fmt.block}, the {fmt.name} block")
        self.in_features, self.out_features, self.fmt = in_features, out_features, fmt

        def zeros(*shape: int, dtype: torch.dtype | None) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.register_buffer("codes", zeros(out_features, in_features // 2, dtype=torch.uint8))  # [N, K/2]
        self.register_buffer("block_scale", zeros(out_features, in_features // fmt.block, dtype=fmt.scale_dtype))
        self.register_buffer("global_scale_bits", zeros(dtype=torch.int64))  # [] fp64 bits of the multiplier
        self.register_buffer("bias", zeros(out_features, dtype=dtype) if bias else None)

    @property
    def packed(self) -> PackedWeight:
        """Packed weight, as views of the buffers."""
        return PackedWeight(self.codes, self.block_scale, self.global_scale_bits.view(torch.float64))

    @packed.setter
    def packed(self, weight: PackedWeight) -> None:
        self.codes, self.block_scale = weight.codes, weight.block_scale
        self.global_scale_bits = weight.global_scale.double().view(torch.int64)

    @property
    def qweight(self) -> Tensor:
        """Alias of ``codes``. PEFT looks for an attribute of this name to find the device of a quantised layer."""
        return self.codes

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Dequantise the weight to a new tensor [N, K] of ``dtype``."""
        return self.fmt.dequantize(self.packed, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer for x [..., K] of any floating dtype; returns [..., N] in the same dtype."""
        return _FrozenMatmul.apply(x, self.fmt, self.codes, self.block_scale, self.global_scale_bits, self.bias)

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}, fmt={self.fmt.name}"


class _FrozenMatmul(torch.autograd.Function):
    """y = x W^T + b with a 4-bit weight W, which backward dequantises again to compute dX = dY W."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        fmt: Format,
        codes: Tensor,
        block_scale: Tensor,
        global_scale_bits: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(codes, block_scale, global_scale_bits)
        ctx.fmt = fmt  # pyright: ignore[reportAttributeAccessIssue]
        weight = PackedWeight(codes, block_scale, global_scale_bits.view(torch.float64))
        return F.linear(x, fmt.dequantize(weight, x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        (dy,) = grads
        codes, block_scale, global_scale_bits = ctx.saved_tensors  # pyright: ignore[reportAttributeAccessIssue]
        weight = PackedWeight(codes, block_scale, global_scale_bits.view(torch.float64))
        dx = dy @ ctx.fmt.dequantize(weight, dy.dtype)  # pyright: ignore[reportAttributeAccessIssue]
        return dx, None, None, None, None, None
