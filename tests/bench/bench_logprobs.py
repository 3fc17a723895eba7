"""Log-probabilities and entropies, forward and backward: python -m tests.bench.bench_logprobs

One JSON line a result, and none while the check against fp64 is red. ``peak_bytes`` is what forward and backward take
at their peak on top of their inputs, the gradient included; ``ratio`` is the median time over the naive way's, measured
in turns with it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from qerl_pl.policy.logprobs import CHUNK_BYTES, token_logprobs

Variant = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def naive(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Dense logits, log-softmax in fp32 or better, gather, and the entropy (logged, no gradient) as a sum."""
    logits = hidden @ weight.t()
    log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(dim=1)
    with torch.no_grad():
        entropy = -(log_p.exp() * log_p).sum(dim=1)
    return log_p.gather(1, targets.unsqueeze(1)).squeeze(1), entropy


def variants(chunk_bytes: int) -> dict[str, Variant]:
    """By name, the naive way first."""
    return {
        "naive": naive,
        "recompute": partial(token_logprobs, chunk_bytes=chunk_bytes),
    }


def draw(tokens: int, hidden_size: int, vocabulary: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    """Hidden states that require a gradient, a frozen head, and targets; the logits' standard deviation is 4."""
    generator = torch.Generator(device).manual_seed(0)
    hidden = torch.randn(tokens, hidden_size, generator=generator, device=device).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, hidden_size, generator=generator, device=device).mul_(4 / hidden_size**0.5)
    return hidden, weight.to(dtype), torch.randint(vocabulary, (tokens,), generator=generator, device=device)


def errors(hidden_size: int, vocabulary: int, dtype: torch.dtype, device: str) -> list[str]:
    """What is further from fp64 than the rounding of logits (spread 4) and of gradients to ``dtype`` explains."""
    hidden, weight, targets = draw(64, hidden_size, vocabulary, dtype, device)
    wide = hidden.detach().double().requires_grad_()
    exact = naive(wide, weight.double(), targets)
    (exact_gradient,) = torch.autograd.grad(exact[0].sum(), wide)
    bound = 4 * torch.finfo(dtype).eps + 1e-5
    found = []
    for name, variant in variants(4 * vocabulary * 24).items():  # three chunks, the last one short
        outputs = variant(hidden, weight, targets)
        (gradient,) = torch.autograd.grad(outputs[0].sum(), hidden)
        relative = (gradient.double() - exact_gradient).norm() / exact_gradient.norm()
        nats = [(output.double() - value).square().mean().sqrt() for output, value in zip(outputs, exact, strict=True)]
        for what, error in (("logprobs", nats[0]), ("entropy", nats[1]), ("gradient", relative)):
            if not error.item() <= bound:
                found.append(f"{name}: {what} off by {error.item():.1e}, more than {bound:.1e}")
    return found


def run(variant: Variant, inputs: tuple[Tensor, ...]) -> tuple[float, int]:
    """Seconds of one forward and backward pass, and the bytes at its peak (0 on a CPU)."""
    cuda = inputs[0].is_cuda
    before = 0
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    start = time.perf_counter()
    logprobs, _ = variant(*inputs)
    torch.autograd.grad(logprobs.sum(), inputs[0])
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start, torch.cuda.max_memory_allocated() - before if cuda else 0


def main(argv: list[str] | None = None) -> int:
    """Print the results; 1 where the check is red."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384 if device == "cuda" else 256)
    parser.add_argument("--hidden", type=int, default=3584 if device == "cuda" else 64, help="Qwen2.5-7B: 3584")
    parser.add_argument("--vocabulary", type=int, default=152064 if device == "cuda" else 5000)
    parser.add_argument("--dtype", default="bfloat16" if device == "cuda" else "float32")
    parser.add_argument("--chunk_bytes", type=int, default=CHUNK_BYTES)
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args(argv)
    dtype = getattr(torch, args.dtype)
    if wrong := errors(args.hidden, args.vocabulary, dtype, device):
        print("no result, the check is red:", *wrong, sep="\n  ", file=sys.stderr)
        return 1
    inputs = draw(args.tokens, args.hidden, args.vocabulary, dtype, device)
    rivals = variants(args.chunk_bytes)
    for variant in rivals.values():
        run(variant, inputs)  # compiles and warms up
    runs = {name: [] for name in rivals}
    for _ in range(args.repeats):
        for name, variant in rivals.items():
            runs[name].append(run(variant, inputs))
    medians = {name: statistics.median(seconds for seconds, _ in found) for name, found in runs.items()}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    for name, found in runs.items():
        seconds = sorted(seconds for seconds, _ in found)
        result = {
            "name": f"logprobs/{name}",
            "shape": {"tokens": args.tokens, "hidden": args.hidden, "vocabulary": args.vocabulary},
            "dtype": args.dtype,
            "median_s": medians[name],
            "spread_s": [seconds[0], seconds[-1]],
            "ratio": medians[name] / medians["naive"],
            "peak_bytes": max(peak for _, peak in found),
            "chunk_bytes": args.chunk_bytes,
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            "torch": torch.__version__,
            "triton": importlib.metadata.version("triton"),
            "commit": commit.strip(),
        }
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
