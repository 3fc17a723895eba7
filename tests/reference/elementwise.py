"""Norms, rotary embeddings and SwiGLU in torch, for tests without a GPU. They round, save tensors for backward and
write in place like the kernels of the library liger-kernel."""

import torch
from torch import Tensor
from torch.nn import functional as F

from qerl_pl.policy.elementwise import Elementwise


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = x.double()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
        ctx.save_for_backward(x, weight, scale.float())
        ctx.epsilon = epsilon
        return (weight * (wide * scale).to(x.dtype)).to(x.dtype)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (dy,), (x, weight, _) = grads, ctx.saved_tensors
        wide = x.double()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + ctx.epsilon)
        product = dy.double() * weight.double()
        dx = scale * (product - wide * scale.square() * (product * wide).mean(-1, keepdim=True))
        dw = (dy.double() * wide * scale).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        return dx.to(x.dtype), None if dw is None else dw.to(weight.dtype), None


def _rotate_in_place(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], dim=-1)
    x.mul_(cos.unsqueeze(1)).add_(turned * sin.unsqueeze(1))


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        rotated = (
            queries.transpose(1, 2).contiguous().transpose(1, 2),
            keys.transpose(1, 2).contiguous().transpose(1, 2),
        )
        for x in rotated:
            _rotate_in_place(x, cos, sin)
        return rotated

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        dq, dk = (dy.transpose(1, 2).contiguous().transpose(1, 2) for dy in grads)
        for dy in (dq, dk):
            _rotate_in_place(dy, cos, -sin)
        return dq, dk, None, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (dy,), (gate, up) = grads, ctx.saved_tensors
        sigmoid = gate.sigmoid()
        d_gate, d_up = dy * up * (sigmoid + gate * sigmoid * (1 - sigmoid)), dy * gate * sigmoid
        gate.data.copy_(d_gate)
        up.data.copy_(d_up)
        return gate, up


REFERENCE = Elementwise(_Norm.apply, _Rotate.apply, _SwiGLU.apply)
