"""Norms with fp32 weights in the sampling copy against bf16: python -m tests.bench.bench_aqn_norm

``aqn-norm/norms``: all norms of a decoding step alone, compiled and in a CUDA graph. ``aqn-norm/rollout``: a decoding
step of engines with either, and what is left of adaptive quantization noise: the root mean square of noisy weights
minus clean ones, read back from the engine, beside sigma.
"""

from __future__ import annotations

import argparse

import torch

from qerl_pl.noise.fp32_norms import add_rms_norm
from qerl_pl.noise.norm_noise import NormNoise
from qerl_pl.rollout.vllm.worker import live_norms
from tests.bench.checkpoints import DEVICE
from tests.bench.exact_engines import VARIANTS, decoding, run_variants, started
from tests.bench.harness import SIZES, captured, emit, timed

SIGMAS = (1e-2, 3.5e-3, 1.2e-3, 5e-4)  # of the first stages and the last


def norms(size: str, rows: int, repeats: int) -> None:
    """Time the norms of all blocks, each of which adds the residual, with weights of either dtype."""
    shape = SIZES[size]
    first, residual = (torch.randn(rows, shape.hidden, device=DEVICE).bfloat16() for _ in range(2))

    def chain(weights: list[torch.Tensor]) -> torch.Tensor:
        x, total = first, residual
        for weight in weights:
            x, total = compiled(x, total, weight, 1e-6)
        return x

    compiled = torch.compile(add_rms_norm) if DEVICE == "cuda" else add_rms_norm
    exact = [1 + 0.1 * torch.randn(shape.hidden, device=DEVICE) for _ in range(2 * shape.num_layers)]
    rounded = [weight.bfloat16() for weight in exact]
    for weights in (exact, rounded):
        chain(weights)  # compiled before it is captured
    runs = {"exact": captured(lambda: chain(exact)), "rounded": captured(lambda: chain(rounded))}
    for name, seconds in timed(runs, repeats=repeats, inner=10).items():
        emit("aqn-norm/norms", {"variant": name, "model": size, "sequences": rows}, "bfloat16", seconds)


def measure(args: argparse.Namespace) -> None:
    """Print the lines of one variant; the norms alone come with the first."""
    if args.variant == VARIANTS[0]:
        for rows in args.sequences:
            norms(args.size, rows, 20)
    engine, policy = started(args.path, max(args.sequences), _fp32_norms=args.variant == "exact")
    clean = {name: weight.float() for name, weight in policy.norm_weights().items()}
    left = {}
    for sigma in SIGMAS:
        engine.set_norm_noise(NormNoise(sigma, 1))
        changes = [weight.float() - clean[name] for name, weight in engine._call(live_norms).items()]
        left[str(sigma)] = torch.cat(changes).square().mean().sqrt().item()
    for count in args.sequences:
        steps, speed = decoding(engine, count, args.repeats)
        about = {"variant": args.variant, "model": args.size, "base": args.base, "sequences": count}
        emit("aqn-norm/rollout", about, "bfloat16", steps, tokens_per_s=speed, sigma_realized=left)
    engine.close()


if __name__ == "__main__":
    run_variants("tests.bench.bench_aqn_norm", None, measure)
