"""A vLLM engine of a random policy in bf16 with one part exact or rounded, for two benchmarks that compare them."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from qerl_pl.policy.lora import LoraSettings
from qerl_pl.policy.policy import Policy, load_policy
from qerl_pl.rollout.base import Sampling
from qerl_pl.rollout.vllm import VLLMEngine
from tests.bench.checkpoints import DEVICE, written_apart
from tests.bench.harness import RANK, SIZES, child_environment

PROMPT_TOKENS, NEW_TOKENS = (128, 256) if DEVICE == "cuda" else (8, 8)
HEAD_SCALE = 6.0  # of a head that is no embedding: logits of 7B then reach about 30, as those of trained models do
VARIANTS = ("exact", "rounded")


def started(path: str, sequences: int, **parts: bool) -> tuple[VLLMEngine, Policy]:
    """An engine, and the policy that it samples from.

    Args:
        path: of the checkpoint.
        sequences: at the same time, at most.
        parts: private switches of the engine to their values.
    """
    warnings.filterwarnings("ignore", message="Unsupported layer type")
    lora = LoraSettings(rank=RANK, alpha=RANK)
    policy = load_policy(path, dtype=torch.bfloat16, lora=lora, seed=0, device=DEVICE)
    if not policy.config.tie_word_embeddings:
        policy.causal_lm.get_output_embeddings().weight.data.mul_(HEAD_SCALE)  # the engine's is the same tensor
    adapter = {name: 0.01 * torch.randn_like(tensor) for name, tensor in policy.adapter_state().items()}
    policy.load_adapter_state(adapter)
    engine = VLLMEngine(max_num_seqs=sequences)
    for name, value in parts.items():
        assert hasattr(engine, name), name
        setattr(engine, name, value)
    engine.start(policy, max_model_len=PROMPT_TOKENS + NEW_TOKENS + 8)
    return engine, policy


def prompts(count: int) -> list[list[int]]:
    """Random ones, the same each time."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (count, PROMPT_TOKENS), generator=generator).tolist()


def decoding(engine: VLLMEngine, count: int, repeats: int) -> tuple[list[float], float]:
    """Seconds of each decoding step, sorted, one a repeat; tokens/s of the fastest repeat. Prompts are left out."""

    def took(new_tokens: int, seed: int) -> tuple[float, int]:
        begin = time.perf_counter()
        groups = engine.generate(prompts(count), Sampling(1, new_tokens), seed=seed)
        return time.perf_counter() - begin, sum(len(completion.tokens) for [completion] in groups)

    took(NEW_TOKENS // 4, 0)  # a warm-up
    prefill = min(took(1, seed)[0] for seed in range(repeats))
    runs = [took(NEW_TOKENS, 1 + seed) for seed in range(repeats)]
    steps = sorted((seconds - prefill) / (NEW_TOKENS - 1) for seconds, _ in runs)
    return steps, max((tokens - count) / (seconds - prefill) for seconds, tokens in runs)


def run_variants(name: str, argv: list[str] | None, measure: Callable[[argparse.Namespace], Any]) -> None:
    """Call ``measure`` in a process of its own for each variant, with ``args.path`` and ``args.variant``.

    Args:
        name: of the module that calls.
        argv: of the command line.
        measure: prints the lines.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SIZES, default="7B" if DEVICE == "cuda" else "tiny")
    parser.add_argument("--base", default="nvfp4")
    parser.add_argument("--sequences", nargs="*", type=int, default=[8, 256] if DEVICE == "cuda" else [2])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "qerl-bench")
    parser.add_argument("--path", help=argparse.SUPPRESS)
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.variant:
        measure(args)
        return
    path = written_apart(args.folder, args.size, args.base)
    for variant in args.variants:
        command = [sys.executable, "-m", name, "--path", str(path), "--variant", variant, "--size", args.size]
        command += ["--base", args.base, "--repeats", str(args.repeats), "--sequences", *map(str, args.sequences)]
        subprocess.run(command, env=child_environment(), check=True)
