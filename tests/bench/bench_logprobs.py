"""Log-probabilities and entropies, forward and backward: python -m tests.bench.bench_logprobs

``peak_bytes`` is what forward and backward take at their peak on top of their inputs, the gradient included; ``ratio``
is the median time over the naive way's, measured in turns with it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import torch
from torch import Tensor

from qerl_pl.policy.logprobs import CHUNK_BYTES, token_logprobs
from tests.bench.harness import CUDA, DEVICE, check, emit, relative_error, reset_peak, timed

Variant = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def naive(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Dense logits, log-softmax in fp32 or better, gather, and the entropy (logged, no gradient) as a sum."""
    logits = hidden @ weight.t()
    log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=1)
    with torch.no_grad():
        entropy = -(log_p.exp() * log_p).sum(dim=1)
    return log_p.gather(1, targets.unsqueeze(1)).squeeze(1), entropy


def variants(chunk_bytes: int) -> dict[str, Variant]:
    """Name the ways to compute them, the naive one first."""
    return {"naive": naive, "recompute": partial(token_logprobs, chunk_bytes=chunk_bytes)}


def draw(tokens: int, hidden_size: int, vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Draw hidden states that require a gradient, a frozen head, and targets; logits have a standard deviation of 4."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, generator=generator, device=DEVICE).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, hidden_size, generator=generator, device=DEVICE).mul_(4 / hidden_size**0.5)
    return hidden, weight.to(dtype), torch.randint(vocabulary, (tokens,), generator=generator, device=DEVICE)


def errors(hidden_size: int, vocabulary: int, dtype: torch.dtype) -> Iterator[tuple[str, float, float]]:
    """Compare with fp64; the bound is the rounding of logits (spread 4) and of gradients to ``dtype``."""
    hidden, weight, targets = draw(64, hidden_size, vocabulary, dtype)
    wide = hidden.detach().double().requires_grad_()
    exact = naive(wide, weight.double(), targets)
    (exact_gradient,) = torch.autograd.grad(exact[0].sum(), wide)
    bound = 4 * torch.finfo(dtype).eps + 1e-5
    for name, variant in variants(4 * vocabulary * 24).items():  # three chunks, the last one short
        outputs = variant(hidden, weight, targets)
        (gradient,) = torch.autograd.grad(outputs[0].sum(), hidden)
        for what, output, value in zip(("logprobs", "entropy"), outputs, exact, strict=True):
            yield f"{name}: {what}", (output.double() - value).square().mean().sqrt().item(), bound
        yield f"{name}: gradient", relative_error(gradient, exact_gradient), bound


def forward_backward(variant: Variant, hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    """One pass down to the gradient of the hidden states."""
    logprobs, _ = variant(hidden, weight, targets)
    torch.autograd.grad(logprobs.sum(), hidden)


def main(argv: list[str] | None = None) -> None:
    """Print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384 if CUDA else 256)
    parser.add_argument("--hidden", type=int, default=3584 if CUDA else 64, help="Qwen2.5-7B: 3584")
    parser.add_argument("--vocabulary", type=int, default=152064 if CUDA else 5000)
    parser.add_argument("--dtype", default="bfloat16" if CUDA else "float32")
    parser.add_argument("--chunk_bytes", type=int, default=CHUNK_BYTES)
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args(argv)
    dtype = getattr(torch, args.dtype)
    check(errors(args.hidden, args.vocabulary, dtype))
    inputs = draw(args.tokens, args.hidden, args.vocabulary, dtype)
    runs = {name: partial(forward_backward, each, *inputs) for name, each in variants(args.chunk_bytes).items()}
    seconds = timed(runs, repeats=args.repeats)
    shape = {"tokens": args.tokens, "hidden": args.hidden, "vocabulary": args.vocabulary}
    for name, found in seconds.items():
        held = reset_peak()
        runs[name]()
        peak = torch.cuda.max_memory_allocated() - held
        ratio = median(found) / median(seconds["naive"])
        emit(f"logprobs/{name}", shape, args.dtype, found, ratio=ratio, peak_bytes=peak, chunk_bytes=args.chunk_bytes)


if __name__ == "__main__":
    main()
