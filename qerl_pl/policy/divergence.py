"""Divergence of a student's next-token distribution from a teacher's, without holding the logits [T, V] of all tokens.

Letters: T tokens, H and H' hidden sizes of student and teacher, V vocabulary, R tokens of a chunk; p is the student's
distribution, q the teacher's, m = beta q + (1 - beta) p. The divergence is the generalised Jensen-Shannon divergence of
GKD (arXiv 2306.13649, equation 1), with its limits at beta 0 and 1. The columns below are beta, the divergence, and its
derivative with respect to z, the student's logits divided by the temperature:

    beta = 0       KL(q || p), forward                             p - q
    0 < beta < 1   beta KL(q || m) + (1 - beta) KL(p || m)         (1 - beta) p (log(p / m) - KL(p || m))
    beta = 1       KL(p || q), reverse                             p (log(p / q) - KL(p || q))

These derivatives do not depend on how the loss uses the divergence. So the forward pass multiplies them by the output
head's weight as soon as a chunk's logits are computed. This gives the gradient with respect to the student's hidden
states, [T, H], which backward only has to scale by the loss's gradient.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qerl_pl.policy.logprobs import (
    CHUNK_BYTES,
    Head,
    chunks,
    fp32_logits,
    per_token,
    rows_of_chunk,
    soft_capped,
    uncapped,
)


class Divergence(NamedTuple):
    """Divergence of the student's distribution from the teacher's at each of T tokens."""

    value: Tensor
    """[T] fp32 nats (fp64 for fp64 inputs), differentiable with respect to the student's hidden states."""
    agrees: Tensor
    """[T] bool, True where student and teacher have the same most likely token."""


def divergence(
    hidden: Tensor,
    head: Head,
    teacher_hidden: Tensor,
    teacher_head: Head,
    *,
    beta: float,
    chunk_bytes: int = CHUNK_BYTES,
) -> Divergence:
    """Compute the generalised Jensen-Shannon divergence of the next-token distributions of a student and a teacher,
    which share a tokenizer, at T tokens. If their vocabularies are padded to different lengths, both distributions are
    restricted to the tokens that both models have.

    Args:
        hidden, teacher_hidden: [T, H] and [T, H'], last hidden states of student and teacher.
        head, teacher_head: their output heads.
        beta: weight of the teacher in the mixture with which both are compared; 0 is the forward KL, KL(teacher ||
            student), 1 the reverse KL.
        chunk_bytes: bytes of the fp32 logits of one chunk; about five times as much memory is needed.

    Raises:
        ValueError: beta is not in [0, 1], or the numbers of tokens differ.
    """
    if not 0 <= beta <= 1:
        raise ValueError(f"beta is {beta}; expected 0 (forward KL) to 1 (reverse KL)")
    if len(hidden) != len(teacher_hidden):
        raise ValueError(
            f"the student has {len(hidden)} tokens and the teacher {len(teacher_hidden)}; expected equal numbers"
        )
    vocabulary = min(len(head.weight), len(teacher_head.weight))
    head = head._replace(weight=head.weight[:vocabulary])
    teacher_head = teacher_head._replace(weight=teacher_head.weight[:vocabulary])
    rows = rows_of_chunk(hidden, vocabulary, chunk_bytes)
    with torch.autocast(hidden.device.type, enabled=False):
        return Divergence(*_Divergence.apply(hidden, head, teacher_hidden, teacher_head, beta, rows))


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, head: Head, teacher_hidden: Tensor, teacher_head: Head, beta: float, rows: int):
        value = per_token(hidden)
        agrees = torch.empty(len(hidden), dtype=torch.bool, device=hidden.device)
        slope = torch.empty_like(hidden) if hidden.requires_grad else None
        for part in chunks(hidden, rows):
            logits = soft_capped(fp32_logits(hidden[part], head.weight), head.logit_cap)
            log_p = (logits / head.temperature).log_softmax(dim=1)
            log_q = soft_capped(fp32_logits(teacher_hidden[part], teacher_head.weight), teacher_head.logit_cap)
            log_q = log_q.div_(teacher_head.temperature).log_softmax(dim=1)
            agrees[part] = log_p.argmax(dim=1) == log_q.argmax(dim=1)
            value[part], d_z = _value_and_derivative(log_p, log_q, beta)
            if slope is not None:
                d_logits = uncapped(d_z.div_(head.temperature), logits, head.logit_cap)
                slope[part] = d_logits.to(hidden.dtype) @ head.weight
        ctx.save_for_backward(slope)
        ctx.mark_non_differentiable(agrees)
        return value, agrees

    @staticmethod
    @once_differentiable
    def backward(ctx, d_value: Tensor, _: Tensor | None):
        [slope] = ctx.saved_tensors
        return torch.mul(slope, d_value.unsqueeze(1), out=torch.empty_like(slope)), None, None, None, None, None


def _value_and_derivative(log_p: Tensor, log_q: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Compute the generalised Jensen-Shannon divergence with weight ``beta`` of student and teacher, [R] in nats, and
    its derivative with respect to z, [R, V], from the log-probabilities of student and teacher, [R, V] each; z are the
    student's logits divided by the temperature."""
    p = log_p.exp()
    if beta == 0:
        q = log_q.exp()
        return (q * (log_q - log_p)).sum(dim=1), p - q
    log_m = log_q if beta == 1 else torch.logaddexp(log_q + math.log(beta), log_p + math.log1p(-beta))
    ratio = log_p - log_m
    of_student = (p * ratio).sum(dim=1)  # KL(p || m)
    d_z = p.mul_(ratio.sub_(of_student.unsqueeze(1)))
    if beta == 1:
        return of_student, d_z
    of_teacher = (log_q.exp() * (log_q - log_m)).sum(dim=1)  # KL(q || m)
    return beta * of_teacher + (1 - beta) * of_student, d_z.mul_(1 - beta)
