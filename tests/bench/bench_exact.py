"""Cost of exact arithmetic in a decoding step of vLLM: python -m tests.bench.bench_exact

An engine computes logits in fp32 and keeps the weights of the norms, which adaptive quantization noise changes by
little, in fp32. It is measured against engines that round one of the two to bf16, as vLLM does. Each engine has a
process of its own. ``head/rollout`` and ``aqn-norm/rollout`` are decoding steps of whole engines, ``aqn-norm/norms`` is
all norms of a step alone, compiled and in one CUDA graph.
"""

from __future__ import annotations

import argparse
import time
import warnings

import torch

from qerl_pl.noise.fp32_norms import add_rms_norm
from qerl_pl.policy.lora import LoraSettings
from qerl_pl.policy.policy import load_policy
from qerl_pl.rollout.base import Sampling
from qerl_pl.rollout.vllm import VLLMEngine
from tests.bench.harness import CUDA, DEVICE, RANK, captured, emit, keep, parser_with, run_apart, timed
from tests.random_checkpoints import FORMATS, written_apart
from tests.random_models import SIZES

PROMPT_TOKENS, NEW_TOKENS = (128, 256) if CUDA else (8, 8)
PARTS = {"head": "_fp32_head", "aqn-norm": "_fp32_norms"}  # to the engine's private switches
ENGINES = ("exact", *PARTS)  # a part's name: it is rounded


def norms(size: str, rows: int, repeats: int) -> None:
    """Time the norms of all blocks, each of which adds the residual, with weights of either dtype."""
    shape = SIZES[size]
    first, residual = (torch.randn(rows, shape.hidden, device=DEVICE).bfloat16() for _ in range(2))

    def chain(weights: list[torch.Tensor]) -> torch.Tensor:
        x, total = first, residual
        for weight in weights:
            x, total = compiled(x, total, weight, 1e-6)
        return x

    compiled = torch.compile(add_rms_norm) if CUDA else add_rms_norm
    exact = [1 + 0.1 * torch.randn(shape.hidden, device=DEVICE) for _ in range(2 * shape.num_layers)]
    rounded = [weight.bfloat16() for weight in exact]
    for weights in (exact, rounded):
        chain(weights)  # compiled before it is captured
    runs = {"exact": captured(lambda: chain(exact)), "rounded": captured(lambda: chain(rounded))}
    for name, seconds in timed(runs, repeats=repeats, inner=10).items():
        emit("aqn-norm/norms", {"variant": name, "model": size, "sequences": rows}, "bfloat16", seconds)


def started(path: str, sequences: int, rounded: str) -> VLLMEngine:
    """Start an engine of a policy in bf16 with a random adapter.

    Args:
        path: of the checkpoint.
        sequences: at the same time, at most.
        rounded: the part that is rounded, if it is one of ``PARTS``.
    """
    warnings.filterwarnings("ignore", message="Unsupported layer type")
    lora = LoraSettings(rank=RANK, alpha=RANK)
    policy = load_policy(path, dtype=torch.bfloat16, lora=lora, seed=0, device=DEVICE)
    adapter = {name: 0.01 * torch.randn_like(tensor) for name, tensor in policy.adapter_state().items()}
    policy.load_adapter_state(adapter)
    engine = VLLMEngine(max_num_seqs=sequences)
    if rounded in PARTS:
        assert hasattr(engine, PARTS[rounded]), PARTS[rounded]
        setattr(engine, PARTS[rounded], False)
    engine.start(policy, max_model_len=PROMPT_TOKENS + NEW_TOKENS + 8)
    return engine


def decoding(engine: VLLMEngine, count: int, repeats: int) -> tuple[list[float], float]:
    """Seconds per decoding step, sorted, one per repeat; tokens/s of the fastest repeat. Prompts are left out."""
    prompts = torch.randint(256, (count, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0)).tolist()

    def took(new_tokens: int, seed: int) -> tuple[float, int]:
        begin = time.perf_counter()
        groups = engine.generate(prompts, Sampling(1, new_tokens), seed=seed)
        return time.perf_counter() - begin, sum(len(completion.tokens) for [completion] in groups)

    took(NEW_TOKENS // 4, 0)  # a warm-up
    prefill = min(took(1, seed)[0] for seed in range(repeats))
    runs = [took(NEW_TOKENS, 1 + seed) for seed in range(repeats)]
    steps = sorted((seconds - prefill) / (NEW_TOKENS - 1) for seconds, _ in runs)
    return steps, max((tokens - count) / (seconds - prefill) for seconds, tokens in runs)


def measure(args: argparse.Namespace) -> None:
    """Print the lines of one engine; the norms alone come with the exact one."""
    exact = args.engine == "exact"
    for rows in args.sequences if exact else ():
        norms(args.size, rows, 20)
    engine = started(args.path, max(args.sequences), args.engine)
    for count in args.sequences:
        steps, speed = decoding(engine, count, args.repeats)
        shape = {"variant": "exact" if exact else "rounded", "model": args.size, "base": args.base, "sequences": count}
        for part in PARTS if exact else [args.engine]:  # the exact engine is what both are compared with
            emit(f"{part}/rollout", shape, "bfloat16", steps, tokens_per_s=speed)
    engine.close()


def main(argv: list[str] | None = None) -> None:
    """Measure each engine in turn."""
    parser = parser_with(__doc__, "--size", "--folder")
    parser.add_argument("--base", choices=FORMATS, default="nvfp4")
    parser.add_argument("--sequences", nargs="*", type=int, default=[8, 256] if CUDA else [2])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engines", nargs="*", choices=ENGINES, default=ENGINES)
    parser.add_argument("--path", help=argparse.SUPPRESS)
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.engine:
        measure(args)
        return
    path = written_apart(args.folder, args.size, args.base)
    options = ["--path", str(path), "--size", args.size, "--base", args.base, "--repeats", str(args.repeats)]
    for engine in args.engines:
        for line in run_apart("bench_exact", [*options, "--engine", engine, "--sequences", *map(str, args.sequences)]):
            keep(line, None)


if __name__ == "__main__":
    main()
