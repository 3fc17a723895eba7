"""Norms with fp32 weights in the sampling copy against bf16: python -m tests.bench.bench_aqn_norm

A decoding step of engines with either, and what is left of adaptive quantization noise: the root mean square of noisy
weights minus clean ones, read back from the engine, beside sigma.
"""

from __future__ import annotations

import argparse

import torch

from qerl_pl.rollout.vllm.worker import live_norms
from tests.bench.exact_engines import decoding, run_variants, started
from tests.bench.harness import emit

SIGMAS = (1e-2, 3.5e-3, 1.2e-3, 5e-4)  # of the first stages and the last


def measure(args: argparse.Namespace) -> None:
    """Print the lines of one variant."""
    engine, policy = started(args.path, max(args.sequences), _fp32_norms=args.variant == "exact")
    clean = {name: weight.float() for name, weight in policy.norm_weights().items()}
    left = {}
    for sigma in SIGMAS:
        engine.set_norm_noise(sigma, 1)
        changes = [weight.float() - clean[name] for name, weight in engine._call(live_norms).items()]
        left[str(sigma)] = torch.cat(changes).square().mean().sqrt().item()
    for count in args.sequences:
        steps, speed = decoding(engine, count, args.repeats)
        about = {"variant": args.variant, "model": args.size, "base": args.base, "sequences": count}
        emit("aqn-norm/rollout", about, "bfloat16", steps, tokens_per_s=speed, sigma_realized=left)
    engine.close()


if __name__ == "__main__":
    run_variants("tests.bench.bench_aqn_norm", None, measure)
