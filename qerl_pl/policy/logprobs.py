"""Hidden states to log-probabilities and entropies of tokens, without ever holding [T, V].

Rows are worked through in chunks of a byte budget, forward and backward; what outlives a chunk is [T], and [T, H] where
asked for. T tokens, H hidden size, V vocabulary, R rows of a chunk. With z = logits / temperature, p = softmax(z):

    d log p[target] / dz = onehot(target) - p
    d entropy       / dz = -p (log p + entropy)

On CUDA the steps over [R, V] between the products are Triton kernels, ``qerl_pl.kernels.softmax``; what stands here is
their definition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_BYTES = 256 * 2**20
HEAD_ROWS = 4096  # of the head that are in fp32 at a time, where there is no product with another dtype's result


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    recompute: bool = True,
    entropy_gradient: bool = True,
    chunk_bytes: int = CHUNK_BYTES,
) -> tuple[Tensor, Tensor]:
    """Log-probability of given tokens, and the entropy of the distribution that each was drawn from.

    Products are taken in the inputs' dtype with fp32 accumulation. Logits of bf16 and fp16 inputs come out in fp32
    (``fp32_logits``), as they do in the rollout engines. All else is done in fp32 (fp64 for fp64 inputs).

    Args:
        hidden: [T, H] of any floating dtype, the states that predict the targets.
        weight: [V, H] of the same dtype, the output embedding; gets a gradient where it requires one.
        targets: [T] int64 in [0, V).
        bias: [V] of the same dtype, added to the logits.
        temperature: divides the logits, as in sampling.
        recompute: True: backward makes the logits again, a third product. False: forward makes the gradient of every
            token with respect to its hidden state, [T, H], and backward scales it. That is exact too, because what
            arrives from above is one number a token, but it leaves the head without a gradient.
        entropy_gradient: let gradients flow through the entropy too. It costs nothing where nothing flows, but for
            ``recompute=False``, which makes and keeps a second [T, H].
        chunk_bytes: budget of one chunk's fp32 logits. On CUDA half as much comes on top of it for bf16 inputs,
            elsewhere about twice as much, and a small part of the head in fp32.

    Returns:
        Log-probabilities and entropies in nats, [T] fp32 each (fp64 for fp64 inputs).

    Raises:
        ValueError: a shape, dtype, target or temperature is not as above, or the head requires a gradient and
            ``recompute`` is False.
    """
    _check(hidden, weight, targets, bias, temperature)
    rows = max(1, chunk_bytes // (_accumulator(hidden).itemsize * len(weight)))
    rows -= rows % 128 if rows > 128 else 0  # whole tiles of the matrix product
    if not recompute and (weight.requires_grad or (bias is not None and bias.requires_grad)):
        raise ValueError("the head requires a gradient, which recompute=False cannot give: freeze it or recompute")
    with torch.autocast(hidden.device.type, enabled=False):
        if recompute or not hidden.requires_grad:
            logprobs, entropy = _Recomputed.apply(hidden, weight, bias, targets, temperature, rows)
        else:
            logprobs, entropy = _Kept.apply(hidden, weight, bias, targets, temperature, rows, entropy_gradient)
    return logprobs, entropy if entropy_gradient else entropy.detach()


class _Recomputed(torch.autograd.Function):
    """Keeps the inputs and [T]; backward goes through the chunks again."""

    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, rows: int
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropy, log_partition = (_per_token(hidden) for _ in range(3))
        statistics, _ = _row_functions(hidden)
        for part in _chunks(hidden, rows):
            found = statistics(fp32_logits(hidden[part], weight, bias), targets[part], temperature)
            logprobs[part], entropy[part], log_partition[part] = found
        ctx.save_for_backward(hidden, weight, bias, targets, entropy, log_partition)
        ctx.temperature, ctx.rows = temperature, rows
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, d_logprobs: Tensor | None, d_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, entropy, log_partition = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.empty_like(hidden) if needs_hidden else None
        d_weight = torch.zeros_like(weight, dtype=entropy.dtype) if needs_weight else None
        d_bias = torch.zeros_like(bias, dtype=entropy.dtype) if needs_bias else None
        d_logprobs = torch.zeros_like(entropy) if d_logprobs is None else d_logprobs
        _, logit_gradient = _row_functions(hidden)
        for part in _chunks(hidden, ctx.rows):
            d_logits = logit_gradient(
                fp32_logits(hidden[part], weight, bias),
                targets[part],
                ctx.temperature,
                entropy[part],
                log_partition[part],
                d_logprobs[part],
                None if d_entropy is None else d_entropy[part],
                hidden.dtype,
            )
            if d_hidden is not None:
                d_hidden[part] = d_logits @ weight
            if d_weight is not None:
                d_weight += _product(d_logits.t(), hidden[part])
            if d_bias is not None:
                d_bias += d_logits.sum(dim=0, dtype=d_bias.dtype)
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        d_bias = None if d_bias is None else d_bias.to(bias.dtype)
        return d_hidden, d_weight, d_bias, None, None, None


class _Kept(torch.autograd.Function):
    """Keeps d logprob / d hidden, [T, H], and d entropy / d hidden where it is asked for."""

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        rows: int,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropy = _per_token(hidden), _per_token(hidden)
        statistics, logit_gradient = _row_functions(hidden)
        slopes = [torch.empty_like(hidden) for _ in range(1 + entropy_gradient)]
        for part in _chunks(hidden, rows):
            logits = fp32_logits(hidden[part], weight, bias)
            logprobs[part], entropy[part], log_partition = statistics(logits, targets[part], temperature)
            one, zero = torch.ones_like(log_partition), torch.zeros_like(log_partition)
            for slope, upstream in zip(slopes, ((one, None), (zero, one)), strict=False):
                d_logits = logit_gradient(
                    logits, targets[part], temperature, entropy[part], log_partition, *upstream, hidden.dtype
                )
                slope[part] = d_logits @ weight
        ctx.save_for_backward(*slopes)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, d_logprobs: Tensor, d_entropy: Tensor) -> tuple[Tensor | None, ...]:
        slope, *entropy_slope = ctx.saved_tensors
        d_hidden = d_logprobs.unsqueeze(1) * slope
        if entropy_slope:
            d_hidden += d_entropy.unsqueeze(1) * entropy_slope[0]
        return d_hidden.to(slope.dtype), *[None] * 6


def statistics_reference(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """[R] log-probability of the targets, entropy and log-partition of softmax(logits / temperature)."""
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
    """[R, V] gradient of what arrives at the log-probabilities and entropies, [R] each, with respect to the logits."""
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
        from qerl_pl.kernels import softmax  # Triton is there where CUDA is

        return softmax.statistics, softmax.logit_gradient
    return statistics_reference, logit_gradient_reference


def fp32_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """[R, H], [V, H] and [V] of one dtype -> [R, V] logits in fp32 (fp64 for fp64 inputs), without gradients.

    Logits rounded to bf16 are off by up to 2^-8 of their size, which is much of the difference between two
    implementations of one policy. CUDA has products of bf16 with fp32 results. Elsewhere a part of the head
    after the other is taken in fp32, never all of it.
    """
    accumulator = _accumulator(hidden)
    if hidden.is_cuda or hidden.dtype == accumulator:
        logits = _product(hidden, weight.t())
    else:
        wide = hidden.to(accumulator)
        logits = torch.cat([wide @ part.to(accumulator).t() for part in weight.split(HEAD_ROWS)], dim=1)
    return logits if bias is None else logits.add_(bias)


def _per_token(hidden: Tensor) -> Tensor:
    return hidden.new_empty(len(hidden), dtype=_accumulator(hidden))


def _product(a: Tensor, b: Tensor) -> Tensor:
    accumulator = _accumulator(a)
    if a.is_cuda and a.dtype != accumulator:
        return torch.mm(a, b, out_dtype=accumulator)
    return (a @ b).to(accumulator)


def _accumulator(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _chunks(hidden: Tensor, rows: int) -> Iterator[slice]:
    return (slice(start, start + rows) for start in range(0, len(hidden), rows))


def _check(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, temperature: float) -> None:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}; expected [T, H] and [V, H]")
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(f"targets is {targets.dtype} {tuple(targets.shape)}; expected int64 [{len(hidden)}]")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias has shape {tuple(bias.shape)}; expected [{len(weight)}], one a row of weight")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != hidden.dtype:
            raise ValueError(
                f"{name} is {tensor.dtype} and hidden {hidden.dtype}; expected one dtype: cast one of them"
            )
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}; expected more than 0: score greedy samples at temperature 1")
    low, high = torch.stack(targets.aminmax()).tolist() if len(targets) else (0, 0)
    if low < 0 or high >= len(weight):
        raise ValueError(f"targets run from {low} to {high}; expected token ids in [0, {len(weight)})")
