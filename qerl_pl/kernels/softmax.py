"""Triton kernels for log-probabilities, entropies and log-partition functions of logits [R, V] (rows, vocabulary), and
for their gradient, each in one pass over the logits; ``qerl_pl.policy.logprobs`` computes the same in plain PyTorch."""

# pyright: reportCallIssue=false, reportOperatorIssue=false
# Triton's type hints do not have its launch options and scalars.
import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # logits that a program holds at a time, a power of 2


def statistics(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Compute, for each row of logits, contiguous [R, V] fp32, the log-probability of its token in ``targets`` [R]
    int64 under softmax(logits / temperature), and the distribution's entropy and log-partition function: three [R] fp32
    in nats."""
    assert logits.is_contiguous(), logits.stride()
    logprobs, entropy, log_partition = logits.new_empty(3, len(logits)).unbind()
    tensors = logits, targets.contiguous(), logprobs, entropy, log_partition
    _statistics_kernel[(len(logits),)](*tensors, 1 / temperature, logits.shape[1], BLOCK=BLOCK, num_warps=8)
    return logprobs, entropy, log_partition


def logit_gradient(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    entropy: Tensor,
    log_partition: Tensor,
    d_logprobs: Tensor,
    d_entropy: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Compute the gradient of a loss with respect to the logits [R, V] fp32, as [R, V] of ``dtype``. ``d_logprobs`` and
    ``d_entropy`` [R] fp32 are the loss's gradients with respect to log-probabilities and entropies, and None counts as
    zero; ``entropy`` and ``log_partition`` [R] are results of ``statistics``."""
    assert logits.is_contiguous(), logits.stride()
    out = torch.empty_like(logits, dtype=dtype)
    tensors = targets, entropy, log_partition, d_logprobs, d_entropy
    # autograd hands over expanded scalars
    contiguous = (tensor if tensor is None else tensor.contiguous() for tensor in tensors)
    grid = len(logits), triton.cdiv(logits.shape[1], BLOCK)
    _gradient_kernel[grid](logits, *contiguous, out, 1 / temperature, logits.shape[1], BLOCK=BLOCK, num_warps=8)
    return out


@triton.jit
def _merge(highest, total, moment, highest2, total2, moment2):
    """Merge the partial softmaxes of two sets of logits z. A partial softmax is the highest z, the sum of exp(z -
    highest), and the sum of exp(z - highest) (z - highest), from which the entropy follows."""
    top = tl.maximum(highest, highest2)
    drop, drop2 = highest - top, highest2 - top
    scale, scale2 = tl.exp(drop), tl.exp(drop2)
    moment = scale * (moment + drop * total) + scale2 * (moment2 + drop2 * total2)
    return top, scale * total + scale2 * total2, moment


@triton.jit
def _statistics_kernel(logits, targets, logprobs, entropy, log_partition, inverse_temperature, V, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    # Each lane accumulates the partial softmax (see ``_merge``) of its logits, and the lanes' results are merged once,
    # after the loop. The highest logit starts at -1e30 and not -inf, because the difference of two infinities would be
    # nan.
    highest = tl.full([BLOCK], -1e30, tl.float32)
    total = tl.full([BLOCK], 0.0, tl.float32)
    moment = tl.full([BLOCK], 0.0, tl.float32)
    for start in range(0, V, BLOCK):
        col = start + tl.arange(0, BLOCK)
        inside = col < V
        # Lanes outside of V get -1e30 after the multiplication by 1 / temperature. If they got it before, the compiler
        # could fuse this multiplication and the later subtraction of the maximum to one FMA. In lanes where the maximum
        # is the same product, rounded, the FMA would return the rounding error, up to 1e22, whose exp is inf or nan.
        z = tl.where(inside, tl.load(logits + row * V + col, mask=inside, other=0.0) * inverse_temperature, -1e30)
        highest, total, moment = _merge(highest, total, moment, z, tl.where(inside, 1.0, 0.0), 0.0)
    highest, total, moment = tl.reduce((highest, total, moment), 0, _merge)
    log_total = tl.log(total)
    target = tl.load(logits + row * V + tl.load(targets + row)) * inverse_temperature
    tl.store(logprobs + row, target - highest - log_total)
    tl.store(entropy + row, log_total - moment / total)
    tl.store(log_partition + row, highest + log_total)


@triton.jit
def _gradient_kernel(
    logits, targets, entropy, log_partition, d_logprobs, d_entropy, out, inverse_temperature, V, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = col < V
    z = tl.load(logits + row * V + col, mask=inside, other=0.0) * inverse_temperature
    log_p = z - tl.load(log_partition + row)
    upstream = tl.load(d_logprobs + row)
    weight = upstream
    if d_entropy is not None:
        weight += tl.load(d_entropy + row) * (log_p + tl.load(entropy + row))
    gradient = tl.where(col == tl.load(targets + row), upstream, 0.0) - tl.exp(log_p) * weight
    tl.store(out + row * V + col, (gradient * inverse_temperature).to(out.dtype.element_ty), mask=inside)
