"""Speed of each model family in NVFP4 and in bf16, one line a family: python -m tests.bench.bench_families

A random model of four blocks as wide as a small published one of the family. Rollouts are by vLLM with the adapter:
``--sequences`` prompts of 128 tokens, completions of 128. Training is forward and backward of 8 rows of 512 tokens, of
which 384 were sampled. Every engine has a process of its own; they start together and are measured one after another.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from qerl_pl.policy.lora import LoraSettings
from qerl_pl.policy.policy import Policy, load_policy
from qerl_pl.quant.quantize import quantize_checkpoint
from qerl_pl.rollout.base import Sampling
from qerl_pl.rollout.vllm import VLLMEngine
from qerl_pl.rollout.vllm.worker import linear_kernels
from qerl_pl.tools.tiny import END_ID, make_tokenizer
from tests.bench import harness
from tests.bench.harness import CUDA, DEVICE, DTYPE, RANK
from tests.bench.together import run_together, turn
from tests.families import tiny_config

BASES = ("nvfp4", "bf16")
PROMPT_TOKENS, NEW_TOKENS = (128, 128) if CUDA else (16, 8)
ROWS, ROW_TOKENS = (8, 512) if CUDA else (2, 64)
CACHE_BYTES = 2**31 if CUDA else 2**26
WIDE: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "vocab_size": 32768,
    "initializer_range": 0.02,
}
WINDOWS = {"sliding_window": 512, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
OWN: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {},
    "gemma3_text": {**WINDOWS, "head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4},
    "gemma4_text": {
        **WINDOWS,
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "global_head_dim": 512,
        "num_global_key_value_heads": 1,
        "final_logit_softcapping": 30.0,
    },
    "qwen3_5_text": {
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
    },
}


def checkpoint(folder: Path, family: str, base: str) -> Path:
    """Write the random model of a family in the form of a base, in a new folder."""
    sizes = {**WIDE, **OWN[family]} if CUDA else {"vocab_size": 320}
    config = tiny_config(family, **{**sizes, "eos_token_id": END_ID})
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "bf16")
    make_tokenizer().save_pretrained(folder / "bf16")
    del model
    if base == "nvfp4":
        quantize_checkpoint(folder / "bf16", folder / "nvfp4", device=DEVICE)
    if CUDA:
        torch.cuda.empty_cache()
    return folder / base


def measure(family: str, base: str, *, sequences: int, eager: bool, repeats: int) -> dict[str, Any]:
    """Start one engine and measure it and training, when it is this process's turn."""
    with tempfile.TemporaryDirectory() as name:
        path = str(checkpoint(Path(name), family, base))
        lora = LoraSettings(rank=RANK, alpha=RANK)
        policy = load_policy(path, dtype=DTYPE, lora=lora, seed=0, device=DEVICE, fused_elementwise="auto")
        engine = VLLMEngine(kv_cache_bytes=CACHE_BYTES, max_num_seqs=sequences, enforce_eager=eager)
        begin = harness.now()
        engine.start(policy, max_model_len=PROMPT_TOKENS + NEW_TOKENS + 8)
        start_s = harness.now() - begin
        with turn():
            found = {
                "rollout_tokens_per_s": max(rollout_speed(engine, sequences, seed) for seed in range(1 + repeats)),
                "training_tokens_per_s": training_speed(policy, repeats),
                "linears": engine._call(linear_kernels),
                "start_s": start_s,
            }
            engine.close()
    return found


def rollout_speed(engine: VLLMEngine, sequences: int, seed: int) -> float:
    """Sample completions of random prompts; returns sampled tokens per second."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(256, (sequences, PROMPT_TOKENS), generator=generator).tolist()
    begin = time.perf_counter()
    groups = engine.generate(prompts, Sampling(1, NEW_TOKENS), seed=seed)
    return sum(len(completion.tokens) for [completion] in groups) / (time.perf_counter() - begin)


def training_speed(policy: Policy, repeats: int) -> float:
    """Compute gradients of random rows; returns tokens per second, prompts included."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(256, (ROWS, ROW_TOKENS), generator=generator).to(DEVICE)
    sampled = (torch.arange(ROW_TOKENS, device=DEVICE) >= ROW_TOKENS // 4).expand(ROWS, -1)

    def update() -> None:
        policy.zero_grad()
        policy.token_stats(tokens, sampled, temperature=1.0).logprobs.sum().backward()

    seconds = harness.timed({"update": update}, repeats=repeats)["update"]
    return tokens.numel() / seconds[0]


def main(argv: list[str] | None = None) -> None:
    """Measure families, all at once, and print a line for each whose two bases were measured."""
    parser = harness.parser_with(__doc__, "--output", "--eager")
    parser.add_argument("--families", nargs="+", choices=OWN, default=list(OWN))
    parser.add_argument("--sequences", type=int, default=64 if CUDA else 2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--base", choices=BASES, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    options = {"sequences": args.sequences, "eager": args.eager, "repeats": args.repeats}
    if args.base:
        found = measure(args.families[0], args.base, **options)
        print(json.dumps({"family": args.families[0], "base": args.base, **found}), flush=True)
        return
    more = ["--sequences", str(args.sequences), "--repeats", str(args.repeats), *(["--eager"] if args.eager else [])]
    line = [sys.executable, "-m", "tests.bench.bench_families", *more]
    programs = {
        f"{family} {base}": ([*line, "--families", family, "--base", base], {})
        for family in args.families
        for base in BASES
    }
    failed: SystemExit | None = None
    with tempfile.TemporaryFile("w+") as file:
        try:
            run_together(programs, stdout=file)
        except SystemExit as error:  # what was measured is still printed
            failed = error
        file.seek(0)
        printed = file.read().splitlines()
    lines = [json.loads(line) for line in printed if line.startswith('{"family"')]
    measured = {(line.pop("family"), line.pop("base")): line for line in lines}
    for family in args.families:
        each = {base: measured[family, base] for base in BASES if (family, base) in measured}
        if len(each) == len(BASES):
            harness.emit("families/speed", {"family": family, **options}, str(DTYPE)[6:], output=args.output, **each)
    if failed:
        raise failed


if __name__ == "__main__":
    main()
