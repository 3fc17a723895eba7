"""Compute log-probabilities and entropies of tokens from hidden states, without holding all logits [T, V].

Tokens are processed in chunks whose logits take a limited number of bytes; only tensors of shape [T] and [T, H] are
kept between chunks. Letters: T tokens, H hidden size, V vocabulary, R tokens of a chunk. With z = logits / temperature
and p = softmax(z):

    d log p[target] / dz = onehot(target) - p
    d entropy       / dz = -p (log p + entropy)

The derivative of log p[target] does not depend on the loss. So on a GPU, the forward pass multiplies it by the output
head's weight as soon as a chunk's logits are computed, and backward only scales the result, [T, H], by the loss's
gradients. Backward computes the logits again only if the loss depends on the entropy. On other devices, backward always
computes the logits again, by a third matrix product with the head's weight.

On CUDA, the Triton kernels of ``qerl_pl.kernels.softmax`` compute all element-wise operations and sums over the logits
of a chunk. They have to compute what ``statistics_reference`` and ``logit_gradient_reference`` in this module compute,
which other devices use.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qerl_pl.model.family import Family

CHUNK_BYTES = 256 * 2**20
HEAD_ROWS = 4096  # rows of the head converted to fp32 at a time on devices without a mixed-precision product


class Head(NamedTuple):
    """Output head: the part of a model that turns hidden states into a distribution over tokens."""

    weight: Tensor
    """[V, H], the output embedding, frozen."""
    temperature: float
    """Divisor of the logits: the sampling temperature times the number by which the model itself divides its logits."""
    logit_cap: float | None = None
    """Soft cap c of the model's logits: logits l become c tanh(l / c) before they are divided by the temperature; None:
    no cap."""


def head_of(model: Any, family: Family, temperature: float) -> Head:
    """Return the output head of a transformers model at the sampling temperature ``temperature``."""
    divisor = 1.0 if family.logit_divisor is None else getattr(model.config, family.logit_divisor)
    cap = None if family.logit_cap is None else getattr(model.config, family.logit_cap)
    embeddings = model.get_output_embeddings()
    assert embeddings is not None
    return Head(embeddings.get_parameter("weight"), temperature * divisor, cap)


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    logit_cap: float | None = None,
    slope_in_forward: bool | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[Tensor, Tensor]:
    """Compute the log-probability of given tokens, and the entropy of the distribution from which each token would be
    sampled, in nats, [T] fp32 each (fp64 for fp64 inputs), differentiable with respect to ``hidden``.

    Matrix products take inputs of their own dtype and accumulate in fp32. The logits of bf16 and fp16 inputs are not
    rounded (``fp32_logits``), because vLLM does not round them either.

    Args:
        hidden: [T, H] of any floating dtype, the hidden states from which the targets are predicted.
        weight: [V, H] of the same dtype, the output embedding, frozen.
        targets: [T] int64 in [0, V).
        temperature, logit_cap: divisor of the logits, and soft cap that is applied before the division (None: no cap).
        slope_in_forward: if ``hidden`` requires a gradient, compute the gradient of the log-probabilities in forward
            and not in backward; None means True on a GPU and False elsewhere.
        chunk_bytes: bytes of one chunk's fp32 logits. For bf16 inputs, CUDA needs half of ``chunk_bytes`` in addition;
            other devices need about twice ``chunk_bytes`` and an fp32 copy of a small part of ``weight``.

    Raises:
        ValueError: a shape, dtype, target or temperature is not as described, or ``weight`` requires a gradient.
    """
    _check(hidden, weight, targets, temperature)
    rows = rows_of_chunk(hidden, len(weight), chunk_bytes)
    with torch.autocast(hidden.device.type, enabled=False):
        early = hidden.requires_grad and (hidden.is_cuda if slope_in_forward is None else slope_in_forward)
        return _TokenLogprobs.apply(hidden, weight, targets, temperature, logit_cap, rows, early)


class _TokenLogprobs(torch.autograd.Function):
    """Autograd node of ``token_logprobs`` that keeps no logits."""

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        logit_cap: float | None,
        rows: int,
        early: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropy, log_partition = (per_token(hidden) for _ in range(3))
        slope = torch.empty_like(hidden) if early else None  # d logprobs / d hidden, [T, H]
        statistics, logit_gradient = _row_functions(hidden)
        for part in chunks(hidden, rows):
            logits = soft_capped(fp32_logits(hidden[part], weight), logit_cap)
            of_part = statistics(logits, targets[part], temperature)
            logprobs[part], entropy[part], log_partition[part] = of_part
            if slope is not None:
                ones = torch.ones_like(of_part[0])
                d_logits = logit_gradient(logits, targets[part], temperature, *of_part[1:], ones, None, hidden.dtype)
                slope[part] = uncapped(d_logits, logits, logit_cap) @ weight
        ctx.save_for_backward(hidden, weight, targets, entropy, log_partition, slope)
        ctx.temperature, ctx.logit_cap, ctx.rows = temperature, logit_cap, rows
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, d_logprobs: Tensor | None, d_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, entropy, log_partition, slope = ctx.saved_tensors
        if d_logprobs is None or slope is None:
            d_hidden = torch.zeros_like(hidden)
        else:
            d_hidden = torch.mul(slope, d_logprobs.unsqueeze(1), out=torch.empty_like(hidden))
            d_logprobs = None
        if d_logprobs is not None or d_entropy is not None:
            _, logit_gradient = _row_functions(hidden)
            d_logprobs = torch.zeros_like(entropy) if d_logprobs is None else d_logprobs
            for part in chunks(hidden, ctx.rows):
                logits = soft_capped(fp32_logits(hidden[part], weight), ctx.logit_cap)
                statistics = targets[part], ctx.temperature, entropy[part], log_partition[part]
                upstream = d_logprobs[part], None if d_entropy is None else d_entropy[part]
                d_logits = logit_gradient(logits, *statistics, *upstream, hidden.dtype)
                d_hidden[part] += uncapped(d_logits, logits, ctx.logit_cap) @ weight
        return d_hidden, None, None, None, None, None, None


def statistics_reference(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Compute log-probabilities of targets, entropies, and logsumexps of logits [R, V] / temperature, [R] in nats."""
    z = logits / temperature  # [R, V]
    log_partition = z.logsumexp(dim=1)
    log_p = z.sub_(log_partition.unsqueeze(1))
    logprobs = log_p.gather(1, targets.unsqueeze(1)).squeeze(1)
    return logprobs, -log_p.exp().mul_(log_p).sum(dim=1), log_partition


def logit_gradient_reference(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    entropy: Tensor,
    log_partition: Tensor,
    d_logprobs: Tensor,
    d_entropy: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Compute the gradient of the loss, [R, V] in ``dtype``, with respect to ``logits``. ``d_logprobs`` and
    ``d_entropy`` [R] are the loss's gradients with respect to the log-probabilities of ``targets`` and to the
    entropies; ``d_entropy`` is None if the loss does not depend on the entropies. ``entropy`` and ``log_partition`` [R]
    are results of ``statistics_reference``."""
    log_p = (logits / temperature).sub_(log_partition.unsqueeze(1))  # [R, V]
    p = log_p.exp()
    weight = d_logprobs.unsqueeze(1)
    if d_entropy is not None:
        weight = log_p.add_(entropy.unsqueeze(1)).mul_(d_entropy.unsqueeze(1)).add_(weight)
    gradient = p.mul_(weight).neg_()
    gradient.scatter_add_(1, targets.unsqueeze(1), d_logprobs.unsqueeze(1))
    return gradient.div_(temperature).to(dtype)


def _row_functions(hidden: Tensor) -> tuple[Callable[..., tuple[Tensor, Tensor, Tensor]], Callable[..., Tensor]]:
    if hidden.is_cuda and hidden.dtype != torch.float64:
        from qerl_pl.kernels import softmax  # imported here, because only CUDA builds of torch include Triton

        return softmax.statistics, softmax.logit_gradient
    return statistics_reference, logit_gradient_reference


def uncapped(d_logits: Tensor, logits: Tensor, logit_cap: float | None) -> Tensor:
    """Convert the gradient ``d_logits`` [R, V] with respect to soft-capped ``logits`` into that with respect to the
    logits before the cap; both are overwritten, and ``d_logits`` is returned. Without a cap, nothing changes."""
    if logit_cap is not None:  # the derivative of c tanh(l / c) is 1 - tanh(l / c)^2
        d_logits.mul_(logits.div_(logit_cap).square_().neg_().add_(1))
    return d_logits


def fp32_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute logits [R, V] in fp32 (fp64 for fp64 inputs) from hidden states [R, H], the output head [V, H] and a bias
    [V], all of one dtype; not differentiable.

    Rounding logits to bf16 would have a relative error of up to 2^-8, a large part of the difference between the
    trainer's and the engine's log-probabilities. CUDA multiplies bf16 matrices with an fp32 result; elsewhere,
    ``HEAD_ROWS`` rows of the head at a time are converted to fp32.
    """
    accumulator = _accumulator(hidden)
    if hidden.dtype == accumulator:
        logits = hidden @ weight.t()
    elif hidden.is_cuda:
        logits = torch.mm(hidden, weight.t(), out_dtype=accumulator)
    else:
        wide = hidden.to(accumulator)
        logits = torch.cat([wide @ part.to(accumulator).t() for part in weight.split(HEAD_ROWS)], dim=1)
    return logits if bias is None else logits.add_(bias)


def soft_capped(logits: Tensor, cap: float | None) -> Tensor:
    """Apply a soft cap to logits in place: l becomes cap tanh(l / cap); without a cap, they stay as they are."""
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def per_token(hidden: Tensor) -> Tensor:
    """Make an uninitialised tensor [T] for hidden states [T, H], in the dtype of their logits."""
    return hidden.new_empty(len(hidden), dtype=_accumulator(hidden))


def _accumulator(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def rows_of_chunk(hidden: Tensor, vocabulary: int, chunk_bytes: int) -> int:
    """Return how many tokens are processed at a time, such that their logits take at most ``chunk_bytes``, but at least
    1. A number above 128 is rounded down to a multiple of 128, the tile size of the matrix product."""
    rows = max(1, chunk_bytes // (_accumulator(hidden).itemsize * vocabulary))
    return rows - rows % 128 if rows > 128 else rows


def chunks(hidden: Tensor, rows: int) -> Iterator[slice]:
    """Divide hidden states [T, H] into parts of at most ``rows`` tokens."""
    return (slice(start, start + rows) for start in range(0, len(hidden), rows))


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> None:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}; expected [T, H] and [V, H]")
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(f"targets is {targets.dtype} {tuple(targets.shape)}; expected int64 [{len(hidden)}]")
    if weight.dtype != hidden.dtype:
        raise ValueError(f"weight is {weight.dtype} and hidden {hidden.dtype}; expected one dtype: cast one of them")
    if weight.requires_grad:
        raise ValueError("the output embedding requires a gradient, which is not computed: freeze it")
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}; expected more than 0: score greedy samples at temperature 1")
    low, high = torch.stack(targets.aminmax()).tolist() if len(targets) else (0, 0)
    if low < 0 or high >= len(weight):
        raise ValueError(f"targets run from {low} to {high}; expected token ids in [0, {len(weight)})")
